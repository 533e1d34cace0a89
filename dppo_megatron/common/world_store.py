"""The store by which ranks find each other and agree, in a process of its own where they are many.

torch keeps it on rank 0, which then has a connection to every other rank.
"""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta

import torch.distributed as dist

from dppo_megatron.common.open_files import raise_limit

MOST_ON_RANK_ZERO = 128  # ranks

_keeper: subprocess.Popen | None = None  # it ends when its standard input does: with this process


def world_store(timeout: timedelta) -> dist.Store | None:
    """The store of the ranks that the environment describes; None where torch's own way serves.

    That is a small world, and ranks of torchrun, whose agent keeps the store.
    """
    size, address = int(os.environ["WORLD_SIZE"]), os.environ["MASTER_ADDR"]
    if size <= MOST_ON_RANK_ZERO or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    port = int(os.environ["MASTER_PORT"])
    if int(os.environ["RANK"]) == 0:
        global _keeper
        command = [sys.executable, "-m", "dppo_megatron.common.world_store", str(port)]
        _keeper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    return dist.TCPStore(address, port, size, is_master=False, timeout=timeout)


def _keep(port: int) -> None:
    raise_limit(1 << 16)
    store = dist.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    sys.stdin.read()
    del store


if __name__ == "__main__":
    _keep(int(sys.argv[1]))
