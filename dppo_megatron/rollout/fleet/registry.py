"""Register a run's services: each engine's address is stored in a file in the run directory."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import SystemRandom
from typing import TypeVar

from dppo_megatron.common.files import read_as, write_json
from dppo_megatron.common.retry import wait_until
from dppo_megatron.config import Config
from dppo_megatron.config.section import Url
from dppo_megatron.errors import ExpectedError
from dppo_megatron.run_dir import RunDir

POLL_S = 0.05
_SERVER_PORTS = range(15_000, 30_000)
Record = TypeVar("Record")


class ServiceTimeout(ExpectedError, TimeoutError):
    """A service did not register in time."""


@dataclass(frozen=True, slots=True)
class Service:
    name: str
    url: Url
    pid: int
    host: str


def register(run: RunDir, name: str, url: str, pid: int) -> None:
    """Register a healthy service; call it only once the service answers."""
    service = Service(name, url, pid, socket.gethostname())
    write_json(run.services / f"{name}.json", asdict(service))


def forget(run: RunDir, name: str, pid: int | None = None) -> None:
    """Remove a service that ended. With `pid`, remove it only if that process is still registered."""
    path = run.services / f"{name}.json"
    registered = read_as(Service, path)
    if registered is not None and pid in (None, registered.pid):
        path.unlink(missing_ok=True)


def forget_all(run: RunDir) -> None:
    """Remove an earlier attempt's registrations and published policy, because none of the services still answers."""
    for path in run.services.glob("*.json") if run.services.exists() else ():
        path.unlink(missing_ok=True)
    run.published.unlink(missing_ok=True)


def engine_urls(config: Config, run: RunDir, check: Callable[[], None] = lambda: None) -> list[str]:
    """Return the URL of every engine, once the engines that the run starts have registered.

    `check` is called while waiting and may raise to end the wait. Raises `ServiceTimeout` naming the engines that did
    not register within `engine.start_timeout_s`.
    """
    if config.engine.urls:
        return list(config.engine.urls)
    names = engine_names(config)
    deadline = time.monotonic() + config.engine.start_timeout_s
    while len(services := engine_services(config, run)) < len(names):
        if time.monotonic() > deadline:
            missing = [name for name in names if name not in services]
            raise ServiceTimeout(
                f"waited {config.engine.start_timeout_s:.0f} s (engine.start_timeout_s) for {', '.join(missing)} to "
                f"register in {run.services}; see {run.log(missing[0])}"
            )
        check()
        time.sleep(POLL_S)
    return [services[name].url for name in names]


def engine_services(config: Config, run: RunDir) -> dict[str, Service]:
    """Return the engines in `engine.urls`, or the currently registered engines, by name."""
    if config.engine.urls:
        return {f"engine-{i}": Service(f"engine-{i}", url, 0, "") for i, url in enumerate(config.engine.urls)}
    registered = {name: read_as(Service, run.services / f"{name}.json") for name in engine_names(config)}
    return {name: service for name, service in registered.items() if service is not None}


def read_when_written(kind: type[Record], path: Path, timeout_s: float, setting: str, log: Path) -> Record:
    """Wait for the record that another process, with log file `log`, writes to `path`. Raises `ServiceTimeout`."""
    if (record := wait_until(lambda: read_as(kind, path), timeout_s, POLL_S)) is None:
        raise ServiceTimeout(f"waited {timeout_s:.0f} s ({setting}) for {log.stem} to write {path}; see {log}")
    return record


def engine_names(config: Config) -> Sequence[str]:
    if not config.samples or config.engine.urls:
        return []
    return [f"engine-{i}" for i in range(config.engine.count)]


def engine_log(index: int, node: int) -> str:
    """Return the log name for an engine node: engine-0 for the first node, then engine-0.1, engine-0.2, ..."""
    return f"engine-{index}.{node}" if node else f"engine-{index}"


def free_port(host: str = "127.0.0.1") -> int:
    """Return an unused port, for a server that will listen on it some seconds later.

    The port is below the range for outgoing connections, because a busy machine may take any port there in seconds.
    """
    for port in SystemRandom().sample(_SERVER_PORTS, 64):
        if not port_in_use(host, port):
            return port
    raise ExpectedError(f"no port of {host} is free; give an address of this machine (engine.host)")


def port_in_use(host: str, port: int) -> bool:
    try:
        family, kind, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(place)
    except (OSError, UnicodeError):  # a label in a name is too long
        return True
    return False
