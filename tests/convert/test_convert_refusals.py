"""The exact mistakes, each refused before anything stands where the result should be."""

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from dppo_megatron.hf import ModelError
from tests.support.model_directories import edit_weights, write_model
from tests.support.models import CONFIGS


@pytest.fixture
def source(models, tmp_path) -> Path:
    return Path(shutil.copytree(models / "qwen3", tmp_path / "source"))


@pytest.fixture
def checkpoint(source, convert) -> Path:
    convert("hf-to-megatron", source, source.with_name("checkpoint"), "--tensor", 2)
    return source.with_name("checkpoint")


def problems(convert, *arguments) -> tuple[str, ...]:
    with pytest.raises(ModelError) as error:
        convert(*arguments)
    return error.value.problems


def untouched(tmp_path: Path) -> bool:
    return not (tmp_path / "target").exists() and not (tmp_path / ".target.writing").exists()


def test_missing_unexpected_and_misshaped_tensors_are_all_listed(source, convert, tmp_path):
    def change(tensors):
        del tensors["model.layers.2.self_attn.q_norm.weight"]
        tensors["model.layers.9.extra"] = torch.zeros(2)
        tensors["model.norm.weight"] = torch.zeros(5)

    edit_weights(source, change)
    assert set(problems(convert, "hf-to-megatron", source, tmp_path / "target")) == {
        "model.layers.2.self_attn.q_norm.weight: missing, expected shape (16,)",
        "model.layers.9.extra: unexpected, shape (2,)",
        "model.norm.weight: shape (5,), expected (32,)",
    }
    assert untouched(tmp_path)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_non_finite_values(source, convert, tmp_path, value):
    def change(tensors):
        for layer in (1, 3):
            tensors[f"model.layers.{layer}.mlp.up_proj.weight"][3, 4] = value

    edit_weights(source, change)
    found = problems(convert, "hf-to-megatron", source, tmp_path / "target")
    assert len(found) == 2
    assert all("mlp.up_proj.weight: contains values that are not finite" in line for line in found)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("direction", ["hf-to-megatron", "hf-to-hf"])
def test_cast_that_overflows(source, convert, tmp_path, direction):
    edit_weights(source, lambda tensors: tensors["model.norm.weight"].fill_(1e6))
    (found,) = problems(convert, direction, source, tmp_path / "target", "--dtype", "fp16")
    assert found.startswith("model.norm.weight: contains values beyond 65504, the largest of fp16; use bf16")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("direction", ["hf-to-megatron", "megatron-to-hf", "hf-to-hf"])
def test_destination_that_exists(source, checkpoint, convert, tmp_path, direction):
    target = tmp_path / "target"
    target.mkdir()
    (target / "precious").touch()
    (found,) = problems(convert, direction, checkpoint if direction.startswith("meg") else source, target)
    assert "already exists" in found
    assert [p.name for p in target.iterdir()] == ["precious"]


@pytest.mark.parametrize("direction", ["hf-to-megatron", "megatron-to-hf"])
def test_full_disk_is_noticed_before_writing(source, checkpoint, convert, tmp_path, monkeypatch, direction):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 1000, 1000))
    (found,) = problems(convert, direction, checkpoint if direction.startswith("meg") else source, tmp_path / "target")
    assert "not enough disk space" in found
    assert untouched(tmp_path)


def test_a_checkpoint_as_source_names_the_command_for_it(checkpoint, convert, tmp_path):
    (found,) = problems(convert, "hf-to-megatron", checkpoint, tmp_path / "target")
    assert found.startswith("a Megatron checkpoint, not a Hugging Face directory; `megatron-to-hf ")
    assert untouched(tmp_path)


def test_impossible_layouts_are_listed(source, convert, tmp_path):
    arguments = ("--tensor", 3, "--pipeline", 5, "--expert", 2)
    assert problems(convert, "hf-to-megatron", source, tmp_path / "target", *arguments) == (
        "--tensor = 3: does not divide num_attention_heads = 4",
        "--tensor = 3: does not divide num_key_value_heads = 2",
        "--pipeline = 5: more than num_hidden_layers = 4",
        "--expert = 2: the model has no experts",
    )
    assert problems(convert, "hf-to-megatron", source, tmp_path / "target", "--pipeline", 0) == (
        "--pipeline = 0: must be at least 1",
    )
    assert untouched(tmp_path)


def test_experts_that_do_not_divide(models, convert, tmp_path):
    arguments = ("--expert", 3, "--expert-tensor", 5)
    assert problems(convert, "hf-to-megatron", models / "qwen3_moe", tmp_path / "target", *arguments) == (
        "--expert = 3: does not divide the number of experts = 4",
        "--expert-tensor = 5: does not divide moe_intermediate_size = 24",
    )


def test_checkpoint_of_another_model(checkpoint, convert, models, tmp_path):
    other = write_model(tmp_path / "other", {**CONFIGS["qwen3"], "rope_theta": 5e5, "num_hidden_layers": 6})
    found = problems(convert, "megatron-to-hf", checkpoint, tmp_path / "target", "--template", other)
    assert f"num_layers = 4 in the checkpoint, 6 in {other}/config.json" in found
    assert f"rope_theta = 10000.0 in the checkpoint, 500000.0 in {other}/config.json" in found
    found = problems(convert, "megatron-to-hf", checkpoint, tmp_path / "target", "--template", models / "qwen2")
    assert "decoder.layers.0.self_attention.linear_qkv.bias: missing" in found
    assert any(line.startswith("decoder.layers.self_attention.q_layernorm.weight: unexpected") for line in found)


def test_run_checkpoint_of_another_model(checkpoint, convert, source, tmp_path):
    shutil.rmtree(checkpoint / "model")
    (checkpoint / "run.json").write_text(json.dumps({"run": {"model.path config.json rms_norm_eps": 1e-5}}))
    (found,) = problems(convert, "megatron-to-hf", checkpoint, tmp_path / "target", "--template", source)
    assert found == f"rms_norm_eps = 1e-05 in the checkpoint, 1e-06 in {source}/config.json"


def test_checkpoint_files_that_are_absent_or_truncated(checkpoint, convert, tmp_path):
    (checkpoint / "__0_0.distcp").unlink()
    file = checkpoint / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:5000])
    found = problems(convert, "megatron-to-hf", checkpoint, tmp_path / "target")
    assert found[0] == "__0_0.distcp: absent, the checkpoint's metadata places tensors there"
    assert found[1].startswith("__1_0.distcp: truncated (5000 bytes")
    (checkpoint / ".metadata").unlink()
    assert problems(convert, "megatron-to-hf", checkpoint, tmp_path / "target")[0].startswith(
        ".metadata: cannot be read"
    )


def test_source_that_is_no_checkpoint_and_checkpoint_without_model(source, checkpoint, convert, tmp_path):
    absent = problems(convert, "megatron-to-hf", tmp_path / "absent", tmp_path / "target")
    assert absent == ("no such directory; name a run, or RUN/checkpoints/step-N",)
    (tmp_path / "step-000012").symlink_to(checkpoint)
    (absent,) = problems(convert, "megatron-to-hf", tmp_path / "step-12", tmp_path / "target")
    assert absent == f"no such directory; {tmp_path} has step-000012"
    (no_model,) = problems(convert, "hf-to-megatron", tmp_path, tmp_path / "target")
    assert no_model.endswith("pass a model's directory (`hf download NAME --local-dir DIR`)")
    assert "convert it by hf-to-megatron" in problems(convert, "megatron-to-hf", source, tmp_path / "target")[0]
    shutil.rmtree(checkpoint / "model")
    assert "--template" in problems(convert, "megatron-to-hf", checkpoint, tmp_path / "target")[0]
