"""HF -> Megatron -> HF on real ranks is bit-equal, and both models compute the same logits."""

import pytest
import torch

from dppo_megatron import hf
from tests.hf.scenarios import Case
from tests.support.model_directories import same_weights
from tests.support.models import CONFIGS


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


def test_every_layout_round_trips_bit_equal(models, trip, case: Case):
    same_weights(models / case.family, trip(case).saved)


def test_each_tensor_is_exported_by_exactly_one_rank(models, trip, case: Case):
    exported = [name for rank in trip(case).found for name in rank["exported"]]
    config = hf.read_hf_config(models / case.family)
    assert sorted(exported) == sorted(hf.WeightMap(config).hf_tensors())


def test_logits_equal_those_of_transformers(models, trip, transformers_logits, case: Case):
    if case.pp > 1:
        pytest.skip("one pipeline stage at a time has no logits")
    expected = transformers_logits[case.family]
    found = trip(case).found[0]["logits"][..., : expected.shape[-1]]
    assert expected.abs().max() > 1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_pipeline_stages_hold_their_own_layers(models, trip, case: Case):
    source = hf.SafetensorsDirectory(models / case.family)
    per_chunk = 4 // (case.pp * (case.vpp or 1))
    for rank, found in enumerate(trip(case).found):
        for stage, chunk in enumerate(found["norms"]):
            first = (stage * case.pp + (rank if case.pp > 1 else 0)) * per_chunk
            for offset, norm in enumerate(chunk):
                name = f"model.layers.{first + offset}.input_layernorm.weight"
                assert torch.equal(norm, source.tensor(name)), (rank, stage, offset)


def test_saved_directory_is_complete(trip):
    saved = trip(Case("qwen3", tp=2)).saved
    files = {path.name for path in saved.iterdir()}
    assert files == {"model.safetensors", "config.json", "tokenizer.json", "generation_config.json"}
    staged = trip(Case("qwen3", pp=2)).saved
    files = {path.name for path in staged.glob("model*")}
    assert files == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    }
    assert not list(staged.parent.glob(".*"))
