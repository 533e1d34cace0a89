"""The nodes of one engine: what they agree on before they start, and their servers, which start and end together."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dppo_megatron.common.files import read_as, write_json
from dppo_megatron.common.process import end_with_parent
from dppo_megatron.common.retry import wait_until
from dppo_megatron.config import Config
from dppo_megatron.engines.kinds import server_command, server_environment
from dppo_megatron.engines.serving import EngineNode
from dppo_megatron.fleet.registry import ServiceTimeout, free_port

log = logging.getLogger(__name__)

POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class EngineStart:
    """What every node of an engine starts with. Node 0 decides: nodes that each looked for the published policy at a
    moment of their own could load different ones."""

    model: str  # directory
    version: int  # policy version of its weights
    port: int  # of the HTTP server
    host: str  # of the nodes' rendezvous, on node 0
    rendezvous_port: int

    @classmethod
    def here(cls, config: Config, model: Path, version: int, port: int) -> EngineStart:
        """Of an engine whose node 0 is this machine."""
        host = config.engine.host
        return cls(str(model), version, port, host, free_port(host) if config.engine.nodes > 1 else 0)

    def write(self, path: Path) -> None:
        write_json(path, asdict(self))

    @classmethod
    def read(cls, path: Path, timeout_s: float) -> EngineStart:
        """Waits until node 0 wrote it. Raises `ServiceTimeout` when it does not within `timeout_s`."""
        start = wait_until(lambda: read_as(cls, path), timeout_s, POLL_S)
        if start is None:
            raise ServiceTimeout(
                f"waited {timeout_s:.0f} s (engine.start_timeout_s) for node 0 of this engine to write {path}; see "
                "the log of that node"
            )
        return start


class Servers:
    """The servers of those nodes of an engine that run on this machine. When one ends, all are of no more use."""

    def __init__(self, processes: Sequence[subprocess.Popen]):
        self._processes = processes
        self.pid = processes[0].pid
        self.stopping = False  # somebody asked them to end

    @classmethod
    def start(cls, config: Config, start: EngineStart, nodes: Sequence[int]) -> Servers:
        """Starts the servers of `nodes` in this process's session, with its output. They share its GPUs."""
        environment, processes = {**os.environ, **server_environment(config, start.version)}, []
        for place, node in enumerate(nodes):
            line = command(config, start, node)
            log.info("starting the server of node %d: %s", node, " ".join(line))
            processes.append(
                subprocess.Popen(
                    line,
                    stdin=subprocess.DEVNULL,
                    env=environment | (_share_of_gpus(config, environment, place) if len(nodes) > 1 else {}),
                    preexec_fn=end_with_parent,
                )
            )
        return cls(processes)

    def poll(self) -> int | None:
        """Exit code of the first that is found to have ended, negative for a signal; None while all run."""
        return next((code for process in self._processes if (code := process.poll()) is not None), None)

    def terminate(self) -> None:
        self.stopping = True
        for process in self._processes:
            process.terminate()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()

    def wait(self) -> None:
        for process in self._processes:
            process.wait()


def command(config: Config, start: EngineStart, node: int) -> list[str]:
    """Command line of the server of `node`."""
    place = EngineNode(node, start.host, start.rendezvous_port) if config.engine.nodes > 1 else None
    return server_command(config, start.port, Path(start.model), start.version, place)


def _share_of_gpus(config: Config, environment: Mapping[str, str], place: int) -> dict[str, str]:
    visible = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    each = config.engine.devices_per_node
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[place * each : (place + 1) * each])} if visible != [""] else {}
