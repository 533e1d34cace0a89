"""One spawn of two trainer ranks, whose scenarios many tests read."""

from __future__ import annotations

from pathlib import Path

import pytest

FAMILIES = ("qwen3", "qwen3_moe", "wide")


@pytest.fixture(scope="session")
def sync_models(tmp_path_factory) -> Path:
    """`<family>-a` and `<family>-b`: one architecture, two sets of random weights."""
    from dppo_megatron.hf import make_random_hf_model
    from tests.support.models import CONFIGS

    # Several blocks of FP8 each way, none of the sizes a multiple of 128.
    configs = CONFIGS | {"wide": CONFIGS["qwen3"] | {"hidden_size": 160, "intermediate_size": 300}}
    root = tmp_path_factory.mktemp("weight_sync")
    for family in FAMILIES:
        for seed, policy in enumerate("ab"):
            make_random_hf_model(root / f"{family}-{policy}", configs[family], seed=seed)
    return root


@pytest.fixture(scope="session")
def sync_runs(tmp_path_factory) -> Path:
    """Run directories of the scenarios, by their names."""
    return tmp_path_factory.mktemp("sync_ranks")


@pytest.fixture(scope="session")
def scenarios(sync_models, sync_runs) -> dict:
    """Scenario name -> what rank 0 returned, or the traceback of the first rank that failed."""
    from tests.weight_sync.scenarios import run_scenarios

    return run_scenarios(sync_models, sync_runs)
