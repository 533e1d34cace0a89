"""Each mistake in a model directory, a model or a target is rejected before anything is written."""

import json
import shutil
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dppo_megatron import hf
from dppo_megatron.hf.transformer_fields import disagreements
from tests.support.fakes.chunk import fake_chunk, put, ranks
from tests.support.model_directories import edit_weights
from tests.support.models import CONFIGS


@pytest.fixture
def model(models, tmp_path) -> Path:
    """A private copy of the tied Qwen3 directory."""
    return Path(shutil.copytree(models / "qwen3", tmp_path / "model"))


def load_problems(model: Path, chunk=None) -> tuple[str, ...]:
    chunk = chunk or fake_chunk(hf.read_hf_config(model))
    with pytest.raises(hf.ModelError) as error:
        hf.load_into([chunk], model, ranks=ranks())
    return error.value.problems


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_good_directory_fills_everything(model, tp_size):
    chunk = fake_chunk(hf.read_hf_config(model), tp_size)
    hf.load_into([chunk], model, ranks=ranks(tp_size - 1, tp_size))
    assert all(torch.isfinite(p).all() for p in chunk.parameters())


def test_missing_unexpected_and_misshaped_are_all_listed_and_nothing_is_written(model):
    def change(tensors):
        del tensors["model.layers.2.self_attn.q_norm.weight"]
        tensors["model.layers.9.extra"] = torch.zeros(2)
        tensors["model.norm.weight"] = torch.zeros(5)

    edit_weights(model, change)
    chunk = fake_chunk(hf.read_hf_config(model))
    assert set(load_problems(model, chunk)) == {
        "model.layers.2.self_attn.q_norm.weight: missing, expected shape (16,)",
        "model.layers.9.extra: unexpected, shape (2,)",
        "model.norm.weight: shape (5,), expected (32,)",
    }
    assert all(torch.isnan(p).all() for p in chunk.parameters())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_values_are_refused(model, value):
    def change(tensors):
        tensors["model.layers.1.self_attn.v_proj.weight"][3, 4] = value

    edit_weights(model, change)
    (problem,) = load_problems(model)
    assert "layers.1.self_attn.v_proj.weight" in problem
    assert "not finite" in problem


def test_tied_head_stored_too(model):
    edit_weights(model, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    hf.load_into([fake_chunk(hf.read_hf_config(model))], model, ranks=ranks())
    edit_weights(model, lambda t: t["lm_head.weight"].add_(1))
    (problem,) = load_problems(model)
    assert "lm_head.weight: differs" in problem


@pytest.mark.parametrize(
    ("quantization", "problem"),
    [
        ({"quant_method": "awq"}, "quantization_config.quant_method = 'awq'"),
        ({"quant_method": "fp8"}, "quantization_config.weight_block_size = None"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"}, "quantization_config.fmt = 'e5m2'"),
    ],
)
def test_quantisations_that_cannot_be_read(model, quantization, problem):
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**raw, "quantization_config": quantization}))
    assert load_problems(model, fake_chunk(hf.parse_hf_config(raw)))[0].startswith(problem)


def test_model_with_other_parameters_than_the_config(model):
    config = hf.read_hf_config(model)
    chunk = fake_chunk(config)
    del chunk.decoder.layers[1].self_attention.q_layernorm
    put(chunk, "decoder.layers.0.self_attention.linear_qkv.bias", (128,))
    put(chunk, "decoder.layers.2.mlp.linear_fc2.weight", (32, 40))
    chunk.mtp = torch.nn.Linear(2, 2, bias=False)
    found = load_problems(model, chunk)
    assert set(found) == {
        "decoder.layers.0.self_attention.linear_qkv.bias: no HF counterpart in family qwen3",
        "mtp.weight: no HF counterpart in family qwen3",
        "model.layers.1.self_attn.q_norm.weight: the Megatron model has no parameter for it",
        "decoder.layers.2.mlp.linear_fc2.weight: shape (32, 40) in the Megatron model, (32, 48) by config.json",
    }
    deeper = hf.parse_hf_config({**CONFIGS["qwen3"], "num_hidden_layers": 5})
    assert "the Megatron model has 5 layers, config.json 4" in load_problems(model, fake_chunk(deeper))


def test_model_that_computes_something_else(model):
    config = hf.read_hf_config(model)
    chunk = fake_chunk(config)
    chunk.config = SimpleNamespace(layernorm_epsilon=1e-5, kv_channels=16, add_bias_linear=False)
    chunk.rotary_base = 500000
    assert load_problems(model, chunk) == (
        "layernorm_epsilon = 1e-05 in the Megatron model, 1e-06 by config.json",
        "rotary_base = 500000 in the Megatron model, 10000.0 by config.json",
    )


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # what Megatron says at import
@pytest.mark.parametrize(
    "change", [{"factor": 32.0}, {"low_freq_factor": 2.0}, {"original_max_position_embeddings": 4096}, {}]
)
def test_llama3_scaling_constants_are_compared_by_their_effect(models, tmp_path, change):
    """Megatron's own rotary embedding takes all but the factor for granted and shows none of them."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    source = Path(shutil.copytree(models / "llama", tmp_path / "llama"))
    raw = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**raw, "rope_parameters": {**LLAMA3, **change}, "head_dim": 128}))
    config = hf.parse_hf_config({**CONFIGS["llama"], "rope_parameters": LLAMA3})
    chunk = fake_chunk(config)
    chunk.rotary_pos_emb = RotaryEmbedding(
        128,
        rotary_percent=1.0,
        rotary_base=10000,
        rope_scaling=True,
        rope_scaling_factor=8.0,
        use_cpu_initialization=True,
    )
    found = disagreements([chunk], hf.read_hf_config(source))
    assert len(found) == bool(change)
    if change:
        (name, value), (line,) = next(iter(change.items())), found
        assert f"{name} = {value}" in line


def test_yarn_constants_are_compared(models):
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    config = hf.parse_hf_config({**CONFIGS["deepseek_v3"], "rope_parameters": yarn})
    chunk = fake_chunk(config)
    chunk.config = SimpleNamespace(rotary_scaling_factor=40.0, original_max_position_embeddings=32, mscale_all_dim=0.0)
    assert disagreements([chunk], config) == [
        "mscale_all_dim = 0.0 in the Megatron model, 1.0 by config.json",
        "rotary_scaling_factor = 40.0 in the Megatron model, 4.0 by config.json",
    ]


def test_wrapped_chunks_are_unwrapped_and_others_refused(model):
    chunk = fake_chunk(hf.read_hf_config(model))
    wrapper = torch.nn.Module()
    wrapper.module = torch.nn.Module()
    wrapper.module.module = chunk
    hf.load_into([wrapper], model, ranks=ranks())
    assert torch.isfinite(chunk.decoder.final_layernorm.weight).all()
    with pytest.raises(TypeError, match="neither a GPTModel"):
        hf.load_into([torch.nn.Linear(2, 2)], model, ranks=ranks())


def loaded(model: Path):
    chunk = fake_chunk(hf.read_hf_config(model))
    hf.load_into([chunk], model, ranks=ranks())
    return chunk


def test_existing_target_is_kept_unless_overwriting_is_allowed(model, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "precious").touch()
    with pytest.raises(hf.ModelError, match="already exists"):
        hf.save_hf([loaded(model)], target, model, ranks=ranks())
    assert [p.name for p in target.iterdir()] == ["precious"]
    hf.save_hf([loaded(model)], target, model, ranks=ranks(), overwrite=True)
    assert not (target / "precious").exists()
    assert (target / "model.safetensors").exists()
    assert {p.name for p in tmp_path.iterdir()} == {"model", "target"}


def test_full_disk_is_noticed_before_writing(model, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 1000, 1000))
    with pytest.raises(hf.ModelError, match="not enough disk space"):
        hf.save_hf([loaded(model)], tmp_path / "target", model, ranks=ranks())
    assert {p.name for p in tmp_path.iterdir()} == {"model"}


def test_failed_write_leaves_nothing(model, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dppo_megatron.hf.safetensors_file.SafetensorsFile.write", full)
    with pytest.raises(OSError, match="No space left"):
        hf.save_hf([loaded(model)], tmp_path / "target", model, ranks=ranks())
    assert {p.name for p in tmp_path.iterdir()} == {"model"}


def test_a_weight_beyond_fp16_is_neither_saved_nor_loaded(model, tmp_path):
    chunk = loaded(model)
    chunk.decoder.layers[1].mlp.linear_fc2.weight.data[2, 3] = -65_520  # the smallest that is rounded to infinity
    expected = (
        "model.layers.1.mlp.down_proj.weight: contains values beyond 65504, the largest of fp16; use bf16 (model.dtype"
    )
    with pytest.raises(hf.ModelError) as error:
        hf.save_hf([chunk], tmp_path / "target", model, torch.float16, ranks=ranks())
    assert expected in str(error.value)
    assert {p.name for p in tmp_path.iterdir()} == {"model"}
    edit_weights(model, lambda tensors: tensors["model.layers.1.mlp.down_proj.weight"].fill_(7e4))
    (problem,) = load_problems(model, fake_chunk(hf.read_hf_config(model)).half())
    assert problem.startswith(expected)


def test_incomplete_model_is_not_saved(model, tmp_path):
    chunk = loaded(model)
    del chunk.decoder.layers[3].input_layernorm
    with pytest.raises(hf.ModelError, match=r"layers\.3\.input_layernorm\.weight: not written"):
        hf.save_hf([chunk], tmp_path / "target", model, ranks=ranks())
    assert {p.name for p in tmp_path.iterdir()} == {"model"}
