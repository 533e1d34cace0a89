"""Which client and which server command an engine kind means: the one place that knows both engines."""

from __future__ import annotations

from pathlib import Path

from dppo_megatron.config import Config

from .engine import Engine
from .vllm_client import VllmEngine
from .vllm_server import vllm_command, vllm_environment


def build_engine(config: Config, url: str) -> Engine:
    """A client of the running server at `url`; opens no connection yet."""
    return VllmEngine(config, url)


def server_command(config: Config, port: int, model: Path) -> list[str]:
    """Command line of a server of `model` on `engine.host`:`port`."""
    return vllm_command(config, port, model)


def server_environment(config: Config, version: int) -> dict[str, str]:
    """What the server's environment needs besides this process's own; it starts with policy `version`."""
    return vllm_environment(config, version=version)
