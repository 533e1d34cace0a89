"""`convert --check DIR`: what of a model is supported, and what is missing, for any config.json."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dppo_megatron.cli import app
from dppo_megatron.convert.check import check
from dppo_megatron.hf import ModelError
from tests.support.model_directories import edit_config, edit_weights
from tests.support.models import CONFIGS
from tests.support.published import PUBLISHED


def written(directory: Path, raw: object) -> Path:
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


def test_a_published_config_without_weights(tmp_path):
    written(tmp_path, {**PUBLISHED["GLM-4.7-Flash"], "transformers_version": "5.0.0", "made_up_scale": 2.0})
    shown = CliRunner().invoke(app, ["convert", "--check", str(tmp_path)])
    assert shown.exit_code == 0
    assert shown.output.splitlines() == [
        f"{tmp_path}:",
        "supported:",
        "  - Glm4MoeLiteForCausalLM: 29,943,393,920 parameters, 47 layers of 2048",
        "  - attention: 20 heads of 256, 64 rotated; latent space of 512",
        "  - experts: 64 in 46 layers, 4 for each token",
        "  - --expert: 1, 2, 4, 8, 16, 32, 64",
        "  - --tensor: 1, 2, 4",
        "  - left out: 1 multi-token prediction layers",
        "  - weights: none here; only config.json was checked",
        "keys of config.json that glm4_moe_lite does not read:",
        "  - made_up_scale = 2.0",
    ]


def test_sizes_need_not_be_powers_of_two(models, tmp_path):
    raw = json.loads((models / "qwen3" / "config.json").read_text())
    sizes = {"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152}
    assert "--tensor: 1, 3" in check(written(tmp_path, raw | sizes)).supported


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_is_supported_with_its_weights(models, family):
    found = check(models / family)
    assert found.family == family
    assert found.missing == found.unread == ()
    assert "weights: compared by name and shape" in found.supported


def test_weights_and_quantisation_that_do_not_fit(models, tmp_path):
    source = Path(shutil.copytree(models / "qwen3", tmp_path / "source"))
    edit_weights(source, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(5)}))
    assert check(source).missing == ("model.norm.weight: shape (5,), expected (32,)",)
    edit_config(source, quantization_config={"quant_method": "awq"})
    found = check(source).missing
    assert found[0].startswith("quantization_config.quant_method = 'awq'")
    assert "quantised weights cannot be trained" in found[-1]


def test_a_known_architecture_with_unsupported_settings(tmp_path):
    found = check(written(tmp_path, {**CONFIGS["mistral"], "sliding_window": 4096, "attn_logit_softcapping": 30.0}))
    assert found.supported == ()
    assert found.missing == ("sliding_window = 4096: sliding-window attention is not supported",)
    assert found.unread == ("attn_logit_softcapping = 30.0",)


def test_an_unknown_architecture_is_compared_with_the_nearest_family(tmp_path):
    text = {**CONFIGS["qwen3_moe"], "partial_rotary_factor": 0.25, "layer_types": ["full_attention", "other"] * 2}
    text["sliding_window"] = 128
    del text["architectures"]
    raw = {"architectures": ["NewForConditionalGeneration"], "text_config": text, "vision_config": {"depth": 2}}
    found = check(written(tmp_path, raw))
    assert found.family == "qwen3_moe"
    assert found.missing[0].startswith("architectures = ['NewForConditionalGeneration']: not supported")
    assert found.missing[1:] == (
        "vision_config: only text is supported",
        "as qwen3_moe: partial_rotary_factor = 0.25: not supported",
    )
    kinds = "layer_types = ['full_attention', 'other', 'full_attention', 'other']"
    assert found.unread == (kinds, "sliding_window = 128")
    switched_off = {**raw, "text_config": {**text, "use_sliding_window": False}}
    assert check(written(tmp_path, switched_off)).unread == (kinds,)
    assert CliRunner().invoke(app, ["convert", "--check", str(tmp_path)]).exit_code == 1


def test_a_directory_without_a_readable_config(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        check(tmp_path)
    with pytest.raises(ModelError, match="must be an object"):
        check(written(tmp_path, []))
