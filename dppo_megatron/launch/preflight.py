"""The preflight of a run on this machine."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from dppo_megatron.common.process import Child
from dppo_megatron.config import Config
from dppo_megatron.fleet.registry import free_port
from dppo_megatron.preflight.watch import Preflight, run_preflight
from dppo_megatron.run_dir import RunDir

from .local_processes import dppo_command


def preflight_here(config: Config, config_file: Path) -> Preflight:
    """See `run_preflight`. One process for each trainer rank and, where weights are broadcast, one that serves."""
    size, children, node = config.parallel.world_size, list[Child](), socket.gethostname()
    serving = int(config.weight_sync.transport == "broadcast" and config.started_engines > 0)
    names = [f"rank-{rank}" for rank in range(size)] + ["serving-0"] * serving

    def start(token: str) -> list[Child]:
        meeting = f"127.0.0.1,{free_port()},{token},{serving}"
        for gpu, name in enumerate(names):
            role, number = name.split("-")
            arguments = ("preflight-task", str(config_file), role, number, str(gpu), str(size), meeting)
            threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
            children.append(Child(name, dppo_command(*arguments), RunDir(config.run.dir).log("preflight"), threads))
        return children

    try:
        return run_preflight(config, dict.fromkeys(names, node), start)
    finally:
        for child in children:
            child.end(0.0)
