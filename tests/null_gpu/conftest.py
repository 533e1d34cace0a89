"""Runs cases of the Actor on the null device, each once however many tests read it."""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.null_gpu.device import here
from tests.support.actor_cases import make_models
from tests.support.ranks import TORCH, Ranks

HERE = Path(__file__).parent
PRELOAD = ("tests.null_gpu.with_te", *TORCH, "dppo_megatron.train.actor")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in (item for item in items if HERE in item.path.parents):
        item.add_marker("null_gpu")
        if not here():
            item.add_marker(pytest.mark.skip(reason="no null device in this process: make test-null-gpu"))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, others = tmp_path_factory.mktemp("null_gpu_models"), {"glm": "glm4_moe", "delta": "qwen3_5", "oss": "gpt_oss"}
    return make_models(root, "qwen3", "qwen3_moe", "deepseek", **others)


@pytest.fixture(scope="session")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Ranks]]:
    """f(size) -> that many ranks with TransformerEngine, each on a null device of its own."""
    os.environ["NULL_GPU_DEVICES"] = "2"
    with ExitStack() as started:
        yield functools.cache(lambda size: started.enter_context(Ranks(size, preload=PRELOAD)))


@pytest.fixture(scope="session")
def run_case(on_ranks, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], list[dict]]:
    """f(case) -> the result of `scenario.run` on each rank."""
    from tests.null_gpu import scenario

    directory = tmp_path_factory.mktemp("null_gpu")

    @functools.cache
    def run(case: scenario.Case) -> list[dict]:
        return on_ranks(case.ranks).run(scenario.run, case=case, models=models, directory=directory)

    return run
