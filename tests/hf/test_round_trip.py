"""HF -> Megatron -> HF on real ranks is bit-equal, and both models compute the same logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dppo_megatron import hf
from tests.hf.scenarios import Case
from tests.support.models import CONFIGS


def equal_directories(left: Path, right: Path) -> None:
    a, b = hf.SafetensorsDirectory(left), hf.SafetensorsDirectory(right)
    assert set(a.tensors) == set(b.tensors)
    for name in a.tensors:
        assert a.tensor(name).dtype == b.tensor(name).dtype
        assert torch.equal(a.tensor(name), b.tensor(name)), name


@pytest.fixture(scope="session")
def transformers_logits(models, token_ids):
    """family -> logits [1, T, V] of the transformers model of that directory."""
    from transformers import AutoModelForCausalLM

    def logits(family: str) -> torch.Tensor:
        model, info = AutoModelForCausalLM.from_pretrained(
            models / family, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        assert not any(info.values()), info
        with torch.no_grad():
            return model.eval()(token_ids).logits

    return {family: logits(family) for family in CONFIGS}


def test_every_layout_round_trips_bit_equal(two_ranks, case: Case):
    out = two_ranks / case.name
    errors = "\n".join(file.read_text() for file in out.glob("error.*"))
    assert not errors, errors
    equal_directories(two_ranks / "models" / case.family, out / "saved")


def test_each_tensor_is_exported_by_exactly_one_rank(two_ranks, case: Case):
    owned = [name for rank in (0, 1) for name in (two_ranks / case.name / f"owned.{rank}").read_text().split()]
    config = hf.read_hf_config(two_ranks / "models" / case.family)
    assert sorted(owned) == sorted(hf.WeightMap(config).hf_tensors())


def test_logits_equal_those_of_transformers(two_ranks, transformers_logits, case: Case):
    if case.pp > 1:
        pytest.skip("one pipeline stage at a time has no logits")
    expected = transformers_logits[case.family]
    found = torch.load(two_ranks / case.name / "logits.pt")[..., : expected.shape[-1]]
    assert expected.abs().max() > 1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_pipeline_stages_hold_their_own_layers(two_ranks, case: Case):
    source = hf.SafetensorsDirectory(two_ranks / "models" / case.family)
    per_chunk = 4 // (case.pp * (case.vpp or 1))
    for rank in (0, 1):
        for stage, chunk in enumerate(torch.load(two_ranks / case.name / f"norms.{rank}.pt")):
            first = (stage * case.pp + (rank if case.pp > 1 else 0)) * per_chunk
            for offset, norm in enumerate(chunk):
                name = f"model.layers.{first + offset}.input_layernorm.weight"
                assert torch.equal(norm, source.tensor(name)), (rank, stage, offset)


def test_saved_directory_is_complete(two_ranks):
    saved = two_ranks / Case("qwen3", tp=2).name / "saved"
    files = {path.name for path in saved.iterdir()}
    assert files == {"model.safetensors", "config.json", "tokenizer.json", "generation_config.json"}
    staged = Case("qwen3", pp=2)
    files = {path.name for path in (two_ranks / staged.name / "saved").glob("model*")}
    assert files == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    }
    assert not list((two_ranks / staged.name).glob(".*"))
