"""Tiny model directories, and every round trip on two ranks once."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.hf.scenarios import Case, round_trip
from tests.support.model_directories import write_model
from tests.support.models import CONFIGS, EXPERT_FAMILIES

CASES = [
    *(Case(family, tp=2) for family in CONFIGS if family != "gpt_oss"),
    *(Case(family, pp=2) for family in CONFIGS),
    Case("qwen3"),  # two data-parallel replicas
    Case("qwen3", pp=2, vpp=2),
    Case("llama", pp=2, vpp=2),
    *(Case(family, ep=2) for family in EXPERT_FAMILIES),
    *(Case(family, tp=2, ep=2) for family in EXPERT_FAMILIES),
    *(Case(family, expert_tensor=2) for family in EXPERT_FAMILIES),  # experts sharded, all else whole on both ranks
    *(Case(family, tp=2, expert_tensor=1) for family in ("qwen3_moe", "gpt_oss")),
    Case("gpt_oss", ep=2),
    Case("gpt_oss", tp=2, ep=2),
]


@pytest.fixture(scope="session")
def token_ids() -> torch.Tensor:
    return torch.randint(0, 61, (1, 24), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """A directory with one model directory per family."""
    root = tmp_path_factory.mktemp("hf") / "models"
    root.mkdir()
    for family in CONFIGS:
        write_model(root / family, CONFIGS[family], torch.float32)
    return root


@dataclass(frozen=True)
class Trip:
    """The results of two ranks for a case."""

    saved: Path
    found: list[dict]  # one of each rank


@pytest.fixture(scope="session")
def trip(ranks, models, token_ids) -> Callable[[Case], Trip]:
    """f(case) -> the round trip of its model; each case is run once."""

    @functools.cache
    def run(case: Case) -> Trip:
        out = models.parent / case.name
        out.mkdir()
        given = {"source": models / case.family, "out": out, "token_ids": token_ids}
        return Trip(out / "saved", ranks(2).run(round_trip, case=case, **given))

    return run


@pytest.fixture(params=CASES, ids=lambda case: case.name, scope="session")
def case(request) -> Case:
    return request.param
