"""Which client and which server command an engine kind means: the one place that knows both engines."""

from __future__ import annotations

import sys
from pathlib import Path

from dppo_megatron.config import Config

from .protocol import Engine
from .sglang.client import SglangEngine
from .sglang.server import sglang_command, sglang_environment, sglang_python
from .vllm.client import VllmEngine
from .vllm.server import vllm_command, vllm_environment


def build_engine(config: Config, url: str) -> Engine:
    """A client of the running server at `url`; opens no connection yet."""
    return SglangEngine(config, url) if config.engine.kind == "sglang" else VllmEngine(config, url)


def server_python(config: Config) -> Path:
    """The interpreter that runs the engine's server."""
    return sglang_python(config) if config.engine.kind == "sglang" else config.engine.python or Path(sys.executable)


def server_command(config: Config, port: int, model: Path, version: int) -> list[str]:
    """Command line of a server of `model`, policy `version`, on `engine.host`:`port`."""
    if config.engine.kind == "sglang":
        return sglang_command(config, port, model, version)
    return vllm_command(config, port, model)


def server_environment(config: Config, version: int) -> dict[str, str]:
    """What the server's environment needs besides this process's own; it starts with policy `version`."""
    if config.engine.kind == "sglang":
        return sglang_environment(config)
    return vllm_environment(config, version=version)
