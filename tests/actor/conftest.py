"""Model directories, and one spawn for each world size whose results many tests read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.actor_cases import DEEPSEEK, QWEN3, QWEN3_MOE, YARN, set_expert_bias
from tests.support.actor_ranks import run_ranks

ONE_RANK = [
    "alone", "alone_tied", "packing", "variants", "against_transformers", "experts_against_transformers",
    "idle_rank", "non_finite", "no_loss_rows", "scores", "schedules", "checkpoint_files", "unwritable", "resume",
]  # fmt: skip
TWO_RANKS = [
    "experts_against_transformers", "idle_rank",
    "tensor", "scores", "tensor_tied", "tensor_fused", "sequence", "sequence_fused_recompute", "data",
    "data_plain_optimizer", "pipeline", "pipeline_virtual", "pipeline_tied",
    "tensor_from_one_rank", "data_from_one_rank", "pipeline_from_one_rank", "resume", "late_rank",
]  # fmt: skip


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    from dppo_megatron.hf import make_random_hf_model

    root = tmp_path_factory.mktemp("actor") / "models"
    make_random_hf_model(root / "qwen3", QWEN3, seed=1)
    make_random_hf_model(root / "tied", {**QWEN3, "tie_word_embeddings": True}, seed=1)
    make_random_hf_model(root / "wider", {**QWEN3, "hidden_size": 64}, seed=1)
    llama3 = {
        "rope_type": "llama3", "rope_theta": 1000.0, "factor": 4.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    }  # fmt: skip
    llama = {**QWEN3, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_parameters": llama3}
    make_random_hf_model(root / "llama", llama, seed=1)
    make_random_hf_model(root / "qwen3_moe", QWEN3_MOE, seed=1)
    make_random_hf_model(root / "deepseek", DEEPSEEK, seed=1)
    make_random_hf_model(root / "moonlight", {**DEEPSEEK, "q_lora_rank": None, "rope_parameters": YARN}, seed=1)
    for model in ("deepseek", "moonlight"):
        set_expert_bias(root / model)
    return root


@pytest.fixture(scope="session")
def one_rank(models, tmp_path_factory) -> dict:
    return run_ranks(1, ONE_RANK, models, tmp_path_factory.mktemp("one_rank"))


@pytest.fixture(scope="session")
def two_ranks(one_rank, models, tmp_path_factory) -> dict:
    """After one rank, whose checkpoint some of its scenarios load."""
    return run_ranks(2, TWO_RANKS, models, tmp_path_factory.mktemp("two_ranks"))
