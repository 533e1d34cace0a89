"""Map `engine.kind` to a kind of engine, with its client, its server command and a folder of its own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dppo_megatron.config import Config
from dppo_megatron.run_dir import RunDir

from .guard.asgi import ROOTS_VARIABLE
from .secret import read_secret
from .serving import EngineKind, exact_environment
from .sglang.kind import Sglang
from .vllm.kind import Vllm

if TYPE_CHECKING:
    from .byte_budget import ByteBudget
    from .protocol import Engine

KINDS: dict[str, EngineKind] = {"vllm": Vllm(), "sglang": Sglang()}


def kind_of(config: Config) -> EngineKind:
    return KINDS[config.engine.kind]


def build_engine(config: Config, url: str, budget: ByteBudget | None = None) -> Engine:
    """Return a client of the running server at `url`. `budget` is shared by all engines of this process."""
    return kind_of(config).client(config, url, budget)


def server_environment(config: Config, version: int) -> dict[str, str]:
    """Return the environment variables to add to this process's own for a server that starts with policy `version`.

    They include the run's secret, which `make_secret` must have created, and the directories that weights may be loaded
    from.
    """
    kind, run = kind_of(config), RunDir(config.run.dir.absolute())
    roots = os.pathsep.join(map(str, (run.root, run.weights)))  # RUN/weights may be a link to larger storage
    secrets = dict.fromkeys(kind.secret_variables, read_secret(config) or "")
    return {ROOTS_VARIABLE: roots, **kind.environment(config, version), **exact_environment(config), **secrets}
