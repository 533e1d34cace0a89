"""The contract's subjects: a real server of each engine with a dense and a mixture-of-experts model.

vLLM with the dense model runs with every `make test`, all four with `make test-engines`.
"""

import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from dppo_megatron.config import Config
from dppo_megatron.rollout.engines.kinds import kind_of
from dppo_megatron.rollout.engines.protocol import Engine
from tests.support.engines import EXPERTS, Reference, engine_config, make_model, running_server, with_engine

MAX_NUM_SEQS = 32


@dataclass(frozen=True)
class Served:
    """A running server that serves model A as policy 0 between tests."""

    config: Config
    url: str
    log: Path
    models: dict[str, Path]  # "a" and "b": one architecture, two sets of random weights

    @property
    def kind(self) -> str:
        return self.config.engine.kind

    def reference(self, name: str) -> Reference:
        return _reference(self.models[name])

    def use(self, function: Callable[[Engine], Awaitable], config: Config | None = None):
        """Result of `function` on a fresh client."""
        return with_engine(config or self.config, self.url, function)


_reference = cache(Reference)


EVERY_TIME = ("vllm", "dense")
SUBJECTS = [
    pytest.param(subject, id="-".join(subject), marks=() if subject == EVERY_TIME else pytest.mark.engines)
    for subject in itertools.product(("vllm", "sglang"), ("dense", "moe"))
]


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory) -> Callable[[str], dict[str, Path]]:
    @cache
    def models(shape: str) -> dict[str, Path]:
        root, experts = tmp_path_factory.mktemp(shape), EXPERTS if shape == "moe" else 0
        return {name: make_model(root / name, seed, experts=experts) for name, seed in (("a", 1), ("b", 2))}

    return models


@pytest.fixture(scope="session", params=SUBJECTS)
def server(request, tiny_models, tmp_path_factory) -> Served:
    kind, shape = request.param
    models = tiny_models(shape)
    config = engine_config(models["a"], kind=kind, max_num_seqs=MAX_NUM_SEQS, routing_replay=shape == "moe")
    if not kind_of(config).python(config).exists():
        pytest.fail(f"{kind_of(config).python(config)} is not there; `make sglang` builds it")
    log = tmp_path_factory.mktemp(f"{kind}-{shape}") / "server.log"
    with running_server(config, log, version=0) as url:
        yield Served(config, url, log, models)


@pytest.fixture
def served(server) -> Served:
    """`server`, which serves policy 0 (model A) again afterwards."""
    yield server
    if server.use(lambda engine: engine.info()).version != 0:
        server.use(lambda engine: engine.load_weights(server.models["a"], 0, "abort"))


@pytest.fixture
def mixture(served) -> Served:
    if not served.config.rollout.routing_replay:
        pytest.skip("a dense model has no experts")
    return served


@pytest.fixture
def load(served):
    """Serves model "a" or "b" as a policy version."""

    async def serve(engine: Engine, name: str, version: int, mode: str = "keep") -> None:
        await engine.load_weights(served.models[name], version, mode)

    return serve
