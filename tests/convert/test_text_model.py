"""`convert hf-to-hf` writes the text model of a directory that also has a vision model."""

import json
from pathlib import Path

import pytest
import torch

from dppo_megatron import hf
from dppo_megatron.convert.check import check
from tests.support.model_directories import edit_weights, same_weights
from tests.support.models import CONFIGS

FAMILIES = {"qwen3_5_text": "Qwen3_5", "qwen3_5_moe_text": "Qwen3_5Moe"}


@pytest.fixture(params=FAMILIES)
def pair(request, models, tmp_path) -> tuple[Path, Path]:
    """(text model, directory as published: text_config, a prefix, experts of a layer in one tensor, vision, MTP)."""
    text, published = models / request.param, tmp_path / "published"
    raw = json.loads((text / "config.json").read_text())
    hf.make_random_hf_model(published, CONFIGS[request.param], seed=1)
    source = hf.SafetensorsDirectory(text)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.clear()
        for name in source.tensors:
            prefixed = name.replace("model.", "model.language_model.", 1)
            if ".experts." not in name:
                tensors[prefixed] = source.tensor(name).clone()
        for layer in range(4 if "moe" in request.param else 0):
            experts = f"model.layers.{layer}.mlp.experts"
            parts = {
                part: torch.stack([source.tensor(f"{experts}.{e}.{part}_proj.weight") for e in range(4)])
                for part in ("gate", "up", "down")
            }
            fused = experts.replace("model.", "model.language_model.", 1)
            tensors[f"{fused}.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
            tensors[f"{fused}.down_proj"] = parts["down"].contiguous()
        tensors |= {"model.visual.patch_embed.proj.weight": torch.ones(2), "mtp.fc.weight": torch.ones(2)}

    edit_weights(published, change)
    above = {"architectures": [f"{FAMILIES[request.param]}ForConditionalGeneration"], "vision_config": {"depth": 1}}
    inner = {name: value for name, value in raw.items() if name not in ("architectures", "tie_word_embeddings")}
    inner["mtp_num_hidden_layers"] = 1
    config = {**above, "tie_word_embeddings": raw["tie_word_embeddings"], "text_config": inner}
    (published / "config.json").write_text(json.dumps(config))
    return text, published


def test_the_text_model_is_written_bit_for_bit(pair, tmp_path, convert):
    text, published = pair
    said = convert("hf-to-hf", published, tmp_path / "out")
    assert "left out: 1 multi-token prediction layers" in said
    same_weights(text, tmp_path / "out")
    config = hf.read_hf_config(tmp_path / "out")
    assert config.identity() == hf.read_hf_config(text).identity()
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "vision_config" not in written
    assert written["mtp_num_hidden_layers"] == 0
    assert check(tmp_path / "out").missing == ()


def test_other_commands_name_the_conversion(pair, tmp_path, convert):
    _, published = pair
    with pytest.raises(hf.ModelError, match=r"`dppo-megatron convert hf-to-hf SRC DST` writes its supported"):
        convert("hf-to-megatron", published, tmp_path / "m")
    found = check(published)
    assert found.family.startswith("qwen3_5")
    assert len(found.missing) == 1
    assert found.supported


def test_problems_of_the_text_model_are_named(pair, tmp_path, convert):
    _, published = pair
    raw = json.loads((published / "config.json").read_text())
    raw["text_config"]["output_gate_type"] = "sigmoid"
    (published / "config.json").write_text(json.dumps(raw))
    with pytest.raises(hf.ModelError, match="output_gate_type = 'sigmoid': only silu is supported"):
        convert("hf-to-hf", published, tmp_path / "out")
    assert len(check(published).missing) == 2
