"""Rule of `engine.port`: the ports of the engines that the run starts are free on this machine."""

from __future__ import annotations

from dppo_megatron.config import Config

from .engine import LAST_PORT


def problems(config: Config) -> list[str]:
    from dppo_megatron.fleet.registry import port_in_use

    engine = config.engine
    ports = range(engine.port, min(engine.port + config.started_engines, LAST_PORT + 1)) if engine.port else ()
    return [
        f"engine.port = {port}: already in use on {engine.host}; choose another, or 0 for a free one"
        for port in ports
        if port_in_use(engine.host, port)
    ]
