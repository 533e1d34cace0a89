"""The store by which ranks find each other and agree, in a process of its own where they are many.

torch keeps it on rank 0, which then has a connection to every other rank.
"""

from __future__ import annotations

import logging
import os
import select
import subprocess
import sys
import threading
from datetime import timedelta

import torch.distributed as dist

from dppo_megatron.common.local_store import LocalStore
from dppo_megatron.common.open_files import raise_limit
from dppo_megatron.errors import ExpectedError

log = logging.getLogger(__name__)

MOST_ON_RANK_ZERO = 128  # ranks


class WorldStoreError(ExpectedError, RuntimeError):
    """The process that keeps the store did not start."""


_keeper: subprocess.Popen | None = None  # it ends when its standard input does: with this process


def world_store(timeout: timedelta) -> dist.Store | None:
    """The store of the ranks that the environment describes, on rank 0 in a small world; None for ranks of torchrun,
    whose agent keeps the store. Raises `WorldStoreError` on rank 0 when the process that is to keep it does not start.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    size, address, port = int(os.environ["WORLD_SIZE"]), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if size <= MOST_ON_RANK_ZERO:
        return LocalStore(address, port, size, os.environ["RANK"] == "0", timeout=timeout, multi_tenant=True)
    if int(os.environ["RANK"]) == 0:
        global _keeper
        _keeper = _start_keeper(port, timeout.total_seconds())
    return dist.TCPStore(address, port, size, is_master=False, timeout=timeout)


def _start_keeper(port: int, timeout_s: float) -> subprocess.Popen:
    command = [sys.executable, "-m", "dppo_megatron.common.world_store", str(port)]
    keeper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    told, _, _ = select.select([keeper.stdout], [], [], timeout_s)
    if not told or not keeper.stdout.readline():
        keeper.kill()
        raise WorldStoreError(
            f"MASTER_PORT = {port}: the process that keeps the store by which the ranks find each other did not start "
            f"within {timeout_s:g} s (exit status {keeper.wait()}); its own error stands above. Is the port taken?"
        )
    keeper.stdout.close()
    threading.Thread(target=_watch, args=(keeper,), name="watch-world-store", daemon=True).start()
    return keeper


def _watch(keeper: subprocess.Popen) -> None:
    status = keeper.wait()
    if not keeper.stdin.closed:
        log.error("the process that keeps the ranks' store ended with status %d: ranks cannot agree any more", status)


def _keep(port: int) -> None:
    raise_limit(1 << 16)
    store = dist.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    print("it is there", flush=True)
    sys.stdin.read()
    del store


if __name__ == "__main__":
    _keep(int(sys.argv[1]))
