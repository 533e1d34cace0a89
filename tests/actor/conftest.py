"""Models, and scenarios that run once on one or two ranks and are read by many tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.actor_cases import (
    DEEPSEEK,
    GLM,
    OSS,
    QWEN3,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_MOE,
    YARN,
    set_expert_bias,
)
from tests.support.actor_ranks import run_scenario
from tests.support.model_directories import write_model
from tests.support.ranks import Ranks


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
    make_random_hf_model(root / "only_experts", {**QWEN3_MOE, "mlp_only_layers": []}, seed=1)
    make_random_hf_model(root / "deepseek", DEEPSEEK, seed=1)
    make_random_hf_model(root / "moonlight", {**DEEPSEEK, "q_lora_rank": None, "rope_parameters": YARN}, seed=1)
    kimi = {"n_group": 1, "topk_group": 1, "rope_parameters": {**YARN, "beta_fast": 1.0}}
    make_random_hf_model(root / "kimi_k2", {**DEEPSEEK, **kimi}, seed=1)
    make_random_hf_model(root / "glm4_moe", GLM, seed=1)
    make_random_hf_model(root / "qwen3_5", QWEN3_5, seed=1)
    make_random_hf_model(root / "qwen3_5_moe", QWEN3_5_MOE, seed=1)
    write_model(root / "gpt_oss", OSS, torch.float32)  # its biases are not zero
    for model in ("deepseek", "moonlight", "kimi_k2", "glm4_moe"):
        set_expert_bias(root / model)
    return root


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
