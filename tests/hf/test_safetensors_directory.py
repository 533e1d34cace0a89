"""Directories written here: sharding, dtypes, reproducibility, and that transformers reads them."""

import json
import os
import threading
from pathlib import Path

import pytest
import torch

from dppo_megatron import hf
from tests.support.fakes.chunk import fake_chunk, ranks
from tests.support.models import CONFIGS


def test_sharded_directory_is_read_back_and_loaded_by_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    hf.make_random_hf_model(tmp_path / "whole", CONFIGS["qwen3"], seed=1)
    hf.make_random_hf_model(tmp_path / "sharded", CONFIGS["qwen3"], seed=1, shard_bytes=20_000)
    whole, sharded = (hf.SafetensorsDirectory(tmp_path / name) for name in ("whole", "sharded"))
    files = sorted(tmp_path.glob("sharded/*.safetensors"))
    assert len(files) > 2
    index = json.loads((tmp_path / "sharded" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sharded.tensor(name).nbytes for name in sharded.tensors)
    assert set(index["weight_map"].values()) == {file.name for file in files}
    assert all(torch.equal(whole.tensor(name), sharded.tensor(name)) for name in whole.tensors)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "sharded", output_loading_info=True)
    assert not any(info.values()), info
    assert model.dtype == torch.float32
    assert model.config.rope_parameters["rope_theta"] == 10000.0


def test_a_header_that_names_a_tensor_twice_is_refused(tmp_path):
    tensor = '"%s":{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]}'
    for second, start in (("b", 4), ("a", 0), ("\\u0061", 0)):
        text = f"{{{tensor % ('a', 0, 4)},{tensor % (second, start, start + 4)}}}"
        content = len(text).to_bytes(8, "little") + text.encode() + bytes(start + 4)
        (tmp_path / "model.safetensors").write_bytes(content)
        if second == "b":
            assert len(hf.SafetensorsDirectory(tmp_path).tensors) == 2
            continue
        with pytest.raises(hf.ModelError, match=r"its header: the key 'a' is given twice; write the file again"):
            hf.SafetensorsDirectory(tmp_path)


def test_random_model_is_a_function_of_its_seed(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        hf.make_random_hf_model(tmp_path / name, CONFIGS["llama"], seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_files_are_readable_by_whom_the_umask_lets_and_flushed_before_they_appear(tmp_path, monkeypatch):
    flushed = []
    sync = os.fsync

    def record(descriptor):
        flushed.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, (tmp_path / "m").exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    before = os.umask(0o027)
    try:
        hf.make_random_hf_model(tmp_path / "m", CONFIGS["llama"], seed=1)
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "m").iterdir()}
    assert modes == {"model.safetensors": 0o640, "config.json": 0o640}
    before_the_rename = [name for name, published in flushed if not published]
    assert any(name.startswith("part-") for name in before_the_rename)
    assert flushed[-1] == (tmp_path.name, True)


def test_random_initialisation_is_the_usual_one(tmp_path):
    raw = {**CONFIGS["qwen2"], "initializer_range": 0.02, "vocab_size": 4096}
    hf.make_random_hf_model(tmp_path / "m", raw, seed=0)
    tensors = hf.SafetensorsDirectory(tmp_path / "m")
    embedding = tensors.tensor("model.embed_tokens.weight")
    assert abs(embedding.std().item() - 0.02) < 2e-4
    assert (tensors.tensor("model.norm.weight") == 1).all()
    assert not tensors.tensor("model.layers.0.self_attn.q_proj.bias").any()


def test_random_model_refusals(tmp_path):
    with pytest.raises(hf.ModelError, match="vocab_size: missing"):
        hf.make_random_hf_model(tmp_path / "m", {**CONFIGS["llama"], "vocab_size": None}, 0)
    hf.make_random_hf_model(tmp_path / "m", CONFIGS["llama"], 0)
    with pytest.raises(hf.ModelError, match="already exists"):
        hf.make_random_hf_model(tmp_path / "m", CONFIGS["llama"], 0)
    assert {p.name for p in tmp_path.iterdir()} == {"m"}


def test_dtype_of_a_saved_directory(models, tmp_path):
    source = models / "deepseek_v3"
    config = hf.read_hf_config(source)
    chunk = fake_chunk(config)
    hf.load_into([chunk], source, ranks=ranks())
    hf.save_hf([chunk], tmp_path / "half", source, dtype=torch.bfloat16, ranks=ranks())
    before, after = hf.SafetensorsDirectory(source), hf.SafetensorsDirectory(tmp_path / "half")
    assert hf.read_hf_config(tmp_path / "half").raw["dtype"] == "bfloat16"
    for name in before.tensors:
        # Selection of experts must not change with the precision of the rest.
        dtype = torch.float32 if "e_score_correction_bias" in name else torch.bfloat16
        assert torch.equal(after.tensor(name), before.tensor(name).to(dtype)), name


def test_reading_copies_nothing_and_changes_nothing(models):
    file = models / "llama" / "model.safetensors"
    content = file.read_bytes()
    tensors = hf.SafetensorsDirectory(models / "llama")
    tensors.tensor("model.norm.weight").zero_()
    assert file.read_bytes() == content


def test_live_parameters_that_were_written_can_still_be_offloaded(models, tmp_path):
    source = models / "llama"
    chunk = fake_chunk(hf.read_hf_config(source))
    hf.load_into([chunk], source, ranks=ranks())
    hf.save_hf([chunk], tmp_path / "saved", source, ranks=ranks())
    assert all(parameter.untyped_storage().resizable() for parameter in chunk.parameters())


def test_a_storage_that_takes_nothing_is_named(tmp_path, monkeypatch):
    hangs = threading.Event()
    monkeypatch.setattr(hf.PartWriter, "_write_file", lambda *_: hangs.wait(30))
    with hf.PartWriter(tmp_path, "x", timeout_s=0.2) as writer:
        writer.add("w", torch.ones(2))
        with pytest.raises(OSError, match=r"part-x-00000.safetensors: the storage accepted no bytes for 0.2 s"):
            writer.close()
    hangs.set()
