"""The kinds of engine that `engine.kind` names: one folder each, and one row of this table.

To add one, write its folder (a client, the server's command line and environment), add its row here and its name to
`engine.kind` in `config/engine.py`. What it cannot do is refused in `checks/engine.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dppo_megatron.config import Config
from dppo_megatron.run_dir import RunDir

from .guard.asgi import ROOTS_VARIABLE, SECRET_VARIABLE
from .inflow import Inflow
from .protocol import Engine
from .secret import read_secret
from .serving import Node, exact_environment
from .sglang.client import SglangEngine
from .sglang.server import sglang_command, sglang_environment, sglang_python
from .vllm.client import VllmEngine
from .vllm.server import vllm_command, vllm_environment, vllm_python


@dataclass(frozen=True, slots=True)
class EngineKind:
    """What the rest of the program needs of one kind of server. `version` is the policy that it starts with."""

    client: Callable[[Config, str, Inflow | None], Engine]  # (config, url, inflow); opens no connection yet
    python: Callable[[Config], Path]  # the interpreter that runs the server
    # (config, port, model directory, version, node, None for an engine of one node) -> argv
    command: Callable[[Config, int, Path, int, Node | None], list[str]]
    environment: Callable[[Config, int], dict[str, str]]  # (config, version) -> variables to add to this process's own
    secret_variables: tuple[str, ...]  # of the environment, through which the server learns the run's secret
    own_receiver: bool  # workers take broadcast weights by our `WeightReceiver`, not by code of the server's own


KINDS = {
    "vllm": EngineKind(
        VllmEngine,
        vllm_python,
        vllm_command,
        vllm_environment,
        secret_variables=(SECRET_VARIABLE, "VLLM_API_KEY"),
        own_receiver=True,
    ),
    "sglang": EngineKind(
        SglangEngine,
        sglang_python,
        sglang_command,
        sglang_environment,
        secret_variables=(SECRET_VARIABLE,),
        own_receiver=False,
    ),
}


def build_engine(config: Config, url: str, inflow: Inflow | None = None) -> Engine:
    """A client of the running server at `url`. inflow: one for all engines that this process samples by."""
    return KINDS[config.engine.kind].client(config, url, inflow)


def server_python(config: Config) -> Path:
    """The interpreter that runs the engine's server."""
    return KINDS[config.engine.kind].python(config)


def server_command(config: Config, port: int, model: Path, version: int, node: Node | None = None) -> list[str]:
    """Command line of a server of `model`, policy `version`, on `engine.host`:`port`; on `node` of several."""
    return KINDS[config.engine.kind].command(config, port, model, version, node)


def server_environment(config: Config, version: int) -> dict[str, str]:
    """What the environment of a server that starts with policy `version` needs besides this process's own: among it
    the run's secret, which `make_secret` has made, and the directories that it may load weights from."""
    kind, run = KINDS[config.engine.kind], RunDir(config.run.dir.absolute())
    roots = os.pathsep.join(map(str, (run.root, run.weights)))  # RUN/weights may be a link to larger storage
    secrets = dict.fromkeys(kind.secret_variables, read_secret(config) or "")
    return {ROOTS_VARIABLE: roots, **kind.environment(config, version), **exact_environment(config), **secrets}
