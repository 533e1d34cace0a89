"""Models, and every scenario once on two trainer ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.models import CONFIGS
from tests.weight_sync.scenarios import SCENARIOS, on_rank

FAMILIES = ("qwen3", "qwen3_moe", "wide", "tied")


@pytest.fixture(scope="session")
def sync_models(tmp_path_factory) -> Path:
    """`<family>-a` and `<family>-b`: one architecture, two sets of random weights."""
    from dppo_megatron.hf import make_random_hf_model

    # Several blocks of FP8 each way, none of the sizes a multiple of 128.
    configs = CONFIGS | {"wide": CONFIGS["qwen3"] | {"hidden_size": 160, "intermediate_size": 300}}
    configs["tied"] = configs["wide"] | {"tie_word_embeddings": True}
    root = tmp_path_factory.mktemp("weight_sync")
    for family in FAMILIES:
        for seed, policy in enumerate("ab"):
            make_random_hf_model(root / f"{family}-{policy}", configs[family], seed=seed)
    return root


@pytest.fixture(scope="session")
def sync_runs(tmp_path_factory) -> Path:
    """Run directories of the scenarios, by their names."""
    return tmp_path_factory.mktemp("publishing")


@pytest.fixture(scope="session")
def result_of(ranks, sync_models, sync_runs) -> Callable[[str], dict]:
    """f(name) -> the result of the scenario on rank 0; each runs once."""

    @functools.cache
    def run(name: str) -> dict:
        return ranks(2).run(on_rank, scenario=SCENARIOS[name], models=sync_models, run=sync_runs / name)[0]

    return run
