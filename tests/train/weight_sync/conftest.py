"""Models that the trainer ranks publish."""

from pathlib import Path

import pytest

from tests.support.models import CONFIGS

FAMILIES = ("qwen3", "qwen3_moe", "wide", "tied")


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
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
