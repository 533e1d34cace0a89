"""Define the store where ranks meet and agree. Depends only on torch, because SGLang servers also import it."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist


class LocalStore(dist.TCPStore):
    """Listens only on loopback under a loopback name; torch's TCPStore listens on every interface."""

    def __init__(
        self, host_name: str, port: int, world_size: int | None = None, is_master: bool = False, **settings: Any
    ):
        if is_master and host_name in ("127.0.0.1", "localhost"):
            settings["master_listen_fd"] = socket.create_server(("127.0.0.1", port), backlog=4096).detach()
        super().__init__(host_name, port, world_size, is_master, **settings)


def world_store(timeout: timedelta) -> dist.Store | None:
    """Return the store for the ranks that the environment describes; None under torchrun, which provides a store.

    Rank 0 hosts the store and has a connection (an open file) to each other rank.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    size, port = int(os.environ["WORLD_SIZE"]), int(os.environ["MASTER_PORT"])
    is_master = os.environ["RANK"] == "0"
    return LocalStore(os.environ["MASTER_ADDR"], port, size, is_master, timeout=timeout, multi_tenant=True)
