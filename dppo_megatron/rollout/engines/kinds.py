"""Map `engine.kind` to a kind of engine. Each kind has a folder with the client and the server command."""

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
    """Return a client for the running server at `url`. All engines of this process share `budget`."""
    return kind_of(config).client(config, url, budget)


def server_environment(config: Config, version: int) -> dict[str, str]:
    """Return the variables to add to this process's environment for a server that starts with policy `version`.

    They include the run's secret and the directories that weights may be loaded from. `make_secret` must have created
    the secret.
    """
    kind, run = kind_of(config), RunDir(config.run.dir.absolute())
    roots = os.pathsep.join(map(str, (run.root, run.weights)))  # RUN/weights may be a link to larger storage
    secrets = dict.fromkeys(kind.secret_variables, read_secret(config) or "")
    return {ROOTS_VARIABLE: roots, **kind.environment(config, version), **exact_environment(config), **secrets}
