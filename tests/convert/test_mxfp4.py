"""MXFP4 weights are read as the OCP specification defines them."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dppo_megatron import hf
from tests.support.models import CONFIGS

EXPERTS, HIDDEN, FFN = 2, 64, 32


def decoded(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The values by sign, exponent and mantissa of each e2m1 code, times 2^(e8m0 - 127)."""
    codes = np.stack((blocks % 16, blocks // 16), -1).reshape(*blocks.shape[:-1], 32)
    sign, exponent, mantissa = codes // 8, codes // 2 % 4, codes % 2
    magnitude = np.where(exponent == 0, 0.5 * mantissa, (1 + 0.5 * mantissa) * 2.0 ** (exponent.astype(int) - 1))
    values = np.where(sign == 1, -magnitude, magnitude) * 2.0 ** (scales.astype(int) - 127)[..., None]
    return values.reshape(*values.shape[:-2], -1).swapaxes(1, 2)


@pytest.fixture
def directory(tmp_path):
    """A directory with the quantised experts of each layer, and zeros elsewhere."""
    config = {
        **CONFIGS["gpt_oss"],
        **{"hidden_size": HIDDEN, "intermediate_size": FFN, "num_local_experts": EXPERTS},
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    }
    generator, tensors = np.random.default_rng(0), {}
    for name, shape in hf.WeightMap(hf.parse_hf_config(config)).hf_tensors().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = torch.zeros(shape, dtype=torch.bfloat16)
            continue
        experts, inputs, outputs = shape
        blocks = generator.integers(0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8)
        tensors[name + "_blocks"] = torch.from_numpy(blocks)
        tensors[name + "_scales"] = torch.from_numpy(generator.integers(110, 140, blocks.shape[:-1], dtype=np.uint8))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_values_equal_those_of_the_specification(directory):
    config = hf.read_hf_config(directory)
    stored, weights = hf.SafetensorsDirectory(directory), hf.open_weights(directory, config, torch.bfloat16)
    assert hf.header_problems(hf.WeightMap(config), weights) == []
    for layer in range(config.num_layers):
        for part in ("gate_up_proj", "down_proj"):
            name = f"model.layers.{layer}.mlp.experts.{part}"
            expected = decoded(*(stored.tensor(name + suffix).numpy() for suffix in ("_blocks", "_scales")))
            found = weights.tensor(name)
            assert found.dtype == torch.bfloat16
            assert len(np.unique(np.abs(expected))) > 50
            np.testing.assert_array_equal(found.double().numpy(), expected)
            assert weights.tensor(name) is found  # experts are read one by one


def test_the_model_is_written_in_bf16_but_not_in_fp8(directory, tmp_path, convert):
    convert("hf-to-hf", directory, tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    stored, written = hf.SafetensorsDirectory(directory), hf.SafetensorsDirectory(tmp_path / "out")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    expected = decoded(*(stored.tensor(name + suffix).numpy() for suffix in ("_blocks", "_scales")))
    assert written.tensors[name].dtype == torch.bfloat16
    np.testing.assert_array_equal(written.tensor(name).double().numpy(), expected)
    with pytest.raises(hf.ModelError, match="not available for experts that share a tensor"):
        convert("hf-to-hf", directory, tmp_path / "fp8", "--quantization", "fp8_block")


def test_an_absent_scale_is_named(directory):
    path = directory / "model.safetensors"
    stored = hf.SafetensorsDirectory(directory)
    tensors = {
        name: stored.tensor(name).clone()
        for name in stored.tensors
        if not name.endswith("0.mlp.experts.down_proj_scales")
    }
    save_file(tensors, path, metadata={"format": "pt"})
    config = hf.read_hf_config(directory)
    problems = hf.header_problems(hf.WeightMap(config), hf.open_weights(directory, config))
    assert any(p.startswith("model.layers.0.mlp.experts.down_proj: missing") for p in problems)
