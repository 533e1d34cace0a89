"""Tiny model directories, and the one spawn of two ranks whose results many tests read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dppo_megatron import hf
from tests.hf.scenarios import Case, run_cases
from tests.support.models import CONFIGS, EXPERT_FAMILIES

CASES = [
    *(Case(family, tp=2) for family in CONFIGS),
    *(Case(family, pp=2) for family in CONFIGS),
    Case("qwen3"),  # two data-parallel replicas
    Case("qwen3", pp=2, vpp=2),
    Case("llama", pp=2, vpp=2),
    *(Case(family, ep=2) for family in EXPERT_FAMILIES),
    *(Case(family, tp=2, ep=2) for family in EXPERT_FAMILIES),
    *(Case(family, expert_tensor=2) for family in EXPERT_FAMILIES),  # experts cut, the rest whole on both ranks
    Case("qwen3_moe", tp=2, expert_tensor=1),
]


def write_model(directory: Path, family: str) -> Path:
    """A random model whose norms and biases are not their neutral values, with something like a tokenizer."""
    hf.make_random_hf_model(directory, CONFIGS[family], seed=3)
    source = hf.SafetensorsDirectory(directory)
    generator = torch.Generator().manual_seed(4)
    tensors = {}
    for name in source.tensors:
        tensor = source.tensor(name).clone()
        if tensor.dim() == 1:
            tensor += 0.2 * torch.randn(tensor.shape, generator=generator)
        tensors[name] = tensor
    writer = hf.PartWriter(directory, "x")
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    (part,) = writer.close()
    (directory / part.file).replace(directory / "model.safetensors")
    (directory / "tokenizer.json").write_text("{}")
    (directory / "generation_config.json").write_text(json.dumps({"do_sample": True}))
    return directory


@pytest.fixture(scope="session")
def token_ids() -> torch.Tensor:
    return torch.randint(0, 61, (1, 24), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """A directory with one model directory per family."""
    root = tmp_path_factory.mktemp("hf") / "models"
    root.mkdir()
    for family in CONFIGS:
        write_model(root / family, family)
    return root


@pytest.fixture(scope="session")
def two_ranks(models, token_ids) -> Path:
    """Where `hf_ranks.run_cases` left the results of CASES."""
    run_cases(CASES, models.parent, token_ids)
    return models.parent


@pytest.fixture(params=CASES, ids=lambda case: case.name, scope="session")
def case(request) -> Case:
    return request.param
