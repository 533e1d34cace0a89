"""torch's store listens on every interface; this one not, under a loopback name. SGLang loads this file by its path."""

import socket

import torch.distributed as dist


class LocalStore(dist.TCPStore):
    def __init__(self, host_name: str, port: int, world_size: int | None = None, is_master: bool = False, **settings):
        if is_master and host_name in ("127.0.0.1", "localhost"):
            settings["master_listen_fd"] = socket.create_server(("127.0.0.1", port), backlog=4096).detach()
        super().__init__(host_name, port, world_size, is_master, **settings)
