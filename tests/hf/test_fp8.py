"""Block-scaled FP8: values, layout, and an independent reader."""

import json
import shutil
from functools import partial

import pytest
import torch

from dppo_megatron import hf
from dppo_megatron.convert.job import ConversionWorker, convert
from dppo_megatron.convert.to_hf import ToHF
from dppo_megatron.hf import fp8
from tests.support.fakes.chunk import fake_chunk, ranks
from tests.support.model_directories import edit_weights
from tests.support.models import CONFIGS

# Several blocks each way, none of the sizes a multiple of 128.
WIDE = {"hidden_size": 160, "intermediate_size": 300, "moe_intermediate_size": 130, "num_hidden_layers": 2}


def half_unit(scaled: torch.Tensor) -> torch.Tensor:
    """Half the distance of neighbouring e4m3 values at each magnitude: 3 mantissa bits, smallest normal 2^-6."""
    exponent = torch.floor(torch.log2(scaled.abs().clamp(min=2.0**-6)))
    return 2.0 ** (exponent - 3) / 2


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (1, 1), (127, 129), (300, 130), (1030, 70)])
@pytest.mark.parametrize("magnitude", [1.0, 1e-30, 1e30])
def test_every_value_is_the_nearest_that_its_block_can_hold(shape, magnitude):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weight = (weight * torch.logspace(-4, 0, shape[1], dtype=torch.float64) * magnitude).float()
    quantized, scale = fp8.quantize(weight)
    assert quantized.dtype == torch.float8_e4m3fn
    assert scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    assert scale.dtype == torch.float32
    per_value = scale.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]].double()
    error = (quantized.double() * per_value - weight.double()).abs()
    assert (error <= half_unit(weight.double() / per_value) * per_value * (1 + 1e-6)).all()
    back = fp8.dequantize(quantized, scale, torch.float32)
    torch.testing.assert_close(back.double(), quantized.double() * per_value, rtol=1e-7, atol=0)


def test_largest_value_of_a_block_is_exact_in_e4m3_and_other_blocks_do_not_see_it():
    weight = torch.full((256, 256), 0.01)
    weight[3, 5] = 448.0
    quantized, scale = fp8.quantize(weight)
    assert quantized[3, 5].float() == 448.0
    torch.testing.assert_close(fp8.dequantize(quantized, scale, torch.float32)[128:, 128:], weight[128:, 128:])


def test_blocks_of_zeros_stay_zero():
    weight = torch.zeros(200, 256)
    weight[150, 200] = 1.0
    quantized, scale = fp8.quantize(weight)
    assert scale.isfinite().all()
    assert scale[0].tolist() == [1.0, 1.0]
    assert torch.equal(fp8.dequantize(quantized, scale, torch.float32), weight)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_are_refused(value):
    weight = torch.ones(130, 130)
    weight[129, 129] = value
    with pytest.raises(ValueError, match="not finite"):
        fp8.quantize(weight)
    tensors = [(f"model.layers.{i}.self_attn.q_proj.weight", weight) for i in (0, 1)]
    with pytest.raises(hf.ModelError) as error:
        list(fp8.quantize_projections(tensors))
    assert len(error.value.problems) == 2


# Experts of gpt-oss share a tensor, which no export quantises; validate refuses FP8 engines for them.
QUANTIZED = [family for family in CONFIGS if family != "gpt_oss"]


@pytest.fixture(params=QUANTIZED)
def exported(request, tmp_path):
    """(source directory, FP8 export of it)."""
    raw = {**CONFIGS[request.param], **WIDE}
    hf.make_random_hf_model(tmp_path / "source", raw, seed=2)
    config = hf.read_hf_config(tmp_path / "source")
    chunk = fake_chunk(config)
    hf.load_into([chunk], tmp_path / "source", ranks=ranks())
    hf.save_hf(
        [chunk], tmp_path / "fp8", tmp_path / "source", dtype=torch.bfloat16, ranks=ranks(), quantization="fp8_block"
    )
    return tmp_path / "source", tmp_path / "fp8"


def test_layout_is_that_of_the_readers(exported):
    source, directory = exported
    stored = hf.SafetensorsDirectory(directory)
    config = json.loads((directory / "config.json").read_text())
    quantization = config["quantization_config"]
    assert quantization["quant_method"] == "fp8"
    assert quantization["weight_block_size"] == [128, 128]
    assert quantization["activation_scheme"] == "dynamic"
    assert "lm_head" in quantization["modules_to_not_convert"]
    assert config["dtype"] == "bfloat16"
    kept = ("embed_tokens", "lm_head", "norm", "mlp.gate.weight", "bias", "linear_attn", "shared_expert_gate")
    for name, info in stored.tensors.items():
        if name.endswith("_scale_inv"):
            rows, columns = stored.tensors[name.removesuffix("_scale_inv")].shape
            assert info.dtype == torch.float32
            assert info.shape == (-(-rows // 128), -(-columns // 128))
        elif any(part in name for part in kept):
            assert info.dtype == (torch.float32 if "e_score" in name else torch.bfloat16), name
        else:
            assert info.dtype == torch.float8_e4m3fn, name
    moe = hf.read_hf_config(source).moe
    gates = [name for name in quantization["modules_to_not_convert"] if name.endswith("mlp.gate")]
    assert len(gates) == (0 if moe is None else sum(moe.layers))
    unquantised = {name.rpartition(".")[0] for name in stored.tensors if "linear_attn." in name and "_proj" in name}
    assert unquantised <= set(quantization["modules_to_not_convert"])


@pytest.mark.parametrize("family", QUANTIZED)
def test_transformers_dequantises_to_the_same_values(family, tmp_path):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    # Its reader takes the block size from the grid of scales, so it knows whole blocks only (and ours of one).
    raw = {**CONFIGS[family], "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2}
    hf.make_random_hf_model(tmp_path / "source", raw, seed=2)
    conversion = partial(ToHF, tmp_path / "source", tmp_path / "fp8", tmp_path / "source", None, "fp8_block")
    convert(conversion, worker=ConversionWorker())
    directory = tmp_path / "fp8"
    stored = hf.SafetensorsDirectory(directory)
    read = hf.open_weights(directory, hf.read_hf_config(directory))
    reader = Fp8Dequantize(None)
    quantized = [name for name, info in stored.tensors.items() if info.dtype == torch.float8_e4m3fn]
    assert len(quantized) >= 10
    for name in quantized:
        weight, scale = stored.tensor(name), stored.tensor(name + "_scale_inv")
        assert torch.equal(read.tensor(name), reader._dequantize_one(weight, scale, output_dtype=torch.float32)), name


def test_loading_an_export_is_within_half_a_unit_of_the_source(exported):
    source, directory = exported
    config = hf.read_hf_config(directory)
    chunk = fake_chunk(hf.read_hf_config(source))
    hf.load_into([chunk], directory, config, ranks=ranks())
    before = hf.SafetensorsDirectory(source)
    read = hf.open_weights(directory, config)
    assert set(read.tensors) == set(before.tensors)
    for name in before.tensors:
        weight, back = before.tensor(name), read.tensor(name).float()
        if not fp8.is_quantized(name):
            assert torch.equal(back, weight.to(read.tensors[name].dtype).float())
            continue
        assert torch.equal(back, fp8.dequantize(*fp8.quantize(weight.to(torch.bfloat16)), torch.float32)), name


@pytest.mark.parametrize("exported", ["qwen3"], indirect=True)
def test_scales_that_are_missing_or_misshaped_are_listed(exported, tmp_path):
    _, directory = exported
    broken = shutil.copytree(directory, tmp_path / "broken")

    def change(tensors):
        del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]
        tensors["model.layers.1.mlp.up_proj.weight_scale_inv"] = torch.ones(7, 7)

    edit_weights(broken, change)
    with pytest.raises(hf.ModelError) as error:
        hf.open_weights(broken, hf.read_hf_config(broken))
    assert set(error.value.problems) == {
        "model.layers.0.mlp.up_proj.weight: FP8 without model.layers.0.mlp.up_proj.weight_scale_inv",
        "model.layers.1.mlp.up_proj.weight_scale_inv: shape (7, 7), expected (3, 2)",
    }
