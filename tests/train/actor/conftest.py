"""Models, and scenarios that run once on one or two ranks and are read by many tests."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.actor_cases import OSS, TINY, make_models
from tests.support.actor_ranks import run_scenario
from tests.support.model_directories import write_model
from tests.support.ranks import Ranks


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("actor") / "models"
    write_model(root / "gpt_oss", OSS, torch.float32)  # its biases are not zero
    return make_models(root, *(name for name in TINY if not name.startswith(".") and name != "gpt_oss"))


Run = Callable[[Callable[..., Any]], Any]


def _results(ranks: Ranks, models: Path, root: Path) -> Run:
    return functools.cache(lambda scenario: run_scenario(ranks, scenario, models, root / scenario.__name__))


@pytest.fixture(scope="session")
def one_rank(ranks, models, tmp_path_factory) -> Run:
    """f(scenario) -> its result on one rank; each scenario runs once."""
    return _results(ranks(1), models, tmp_path_factory.mktemp("one_rank"))


@pytest.fixture(scope="session")
def two_ranks(ranks, models, tmp_path_factory) -> Run:
    """f(scenario) -> the result of rank 0 of two; each scenario runs once."""
    return _results(ranks(2), models, tmp_path_factory.mktemp("two_ranks"))


@pytest.fixture
def on(one_rank, two_ranks) -> Callable[[int, Callable[..., Any]], Any]:
    """f(size, scenario) -> the result of rank 0 of so many."""
    return lambda size, scenario: {1: one_rank, 2: two_ranks}[size](scenario)
