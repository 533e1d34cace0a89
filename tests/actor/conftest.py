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
    make_models,
)
from tests.support.actor_ranks import run_scenario
from tests.support.model_directories import write_model
from tests.support.ranks import Ranks


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("actor") / "models"
    llama3 = {
        "rope_type": "llama3", "rope_theta": 1000.0, "factor": 4.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    }  # fmt: skip
    write_model(root / "gpt_oss", OSS, torch.float32)  # its biases are not zero
    return make_models(
        root,
        qwen3=QWEN3,
        tied={**QWEN3, "tie_word_embeddings": True},
        wider={**QWEN3, "hidden_size": 64},
        llama={**QWEN3, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_parameters": llama3},
        qwen3_moe=QWEN3_MOE,
        only_experts={**QWEN3_MOE, "mlp_only_layers": []},
        deepseek=DEEPSEEK,
        moonlight={**DEEPSEEK, "q_lora_rank": None, "rope_parameters": YARN},
        kimi_k2={**DEEPSEEK, "n_group": 1, "topk_group": 1, "rope_parameters": {**YARN, "beta_fast": 1.0}},
        glm4_moe=GLM,
        qwen3_5=QWEN3_5,
        qwen3_5_moe=QWEN3_5_MOE,
    )


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
