"""The model that FP8 engines start with: made once, by engine 0, and the same tensors as every publish after it."""

import threading
from pathlib import Path

import pytest
import torch

from dppo_megatron.config import Config
from dppo_megatron.hf import SafetensorsDirectory, fp8, make_random_hf_model, read_hf_config
from dppo_megatron.run.launch.engine import StartModelTimeout, ensure_start_model
from dppo_megatron.weights.manifest import BadWeights, Manifest
from tests.support.configs import make_config


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    from tests.support.models import CONFIGS

    directory = tmp_path_factory.mktemp("model") / "qwen3"
    make_random_hf_model(directory, CONFIGS["qwen3"], seed=1, dtype=torch.bfloat16)
    return directory


def config(model: Path, run: Path, quantization: str = "fp8_block") -> Config:
    return make_config(
        run={"dir": run}, model={"path": model}, engine={"quantization": quantization, "start_timeout_s": 0.5}
    )


def test_engine_0_quantises_the_model_once(model, tmp_path):
    directory = ensure_start_model(config(model, tmp_path), 0)
    assert directory != model
    assert read_hf_config(directory).quantization == fp8.quantization_config(read_hf_config(model))
    source, made = SafetensorsDirectory(model), SafetensorsDirectory(directory)
    expected = dict(fp8.quantize_projections((name, source.tensor(name)) for name in source.tensors))
    assert set(made.tensors) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(made.tensor(name).view(torch.uint8), tensor.view(torch.uint8)), name
    stamps = [file.stat().st_mtime_ns for file in sorted(directory.iterdir())]
    assert ensure_start_model(config(model, tmp_path), 0) == directory
    assert [file.stat().st_mtime_ns for file in sorted(directory.iterdir())] == stamps


def test_other_engines_wait_for_it(model, tmp_path):
    with pytest.raises(StartModelTimeout, match=r"engine\.start_timeout_s"):
        ensure_start_model(config(model, tmp_path), 1)
    making = threading.Timer(0.1, ensure_start_model, (config(model, tmp_path), 0))
    making.start()
    assert (ensure_start_model(config(model, tmp_path), 1) / "config.json").exists()
    making.join()


def test_a_model_that_is_not_to_be_quantised_or_already_is_stays_where_it_is(model, tmp_path):
    assert ensure_start_model(config(model, tmp_path, "none"), 0) == model
    quantised = ensure_start_model(config(model, tmp_path), 0)
    assert ensure_start_model(config(quantised, tmp_path / "other"), 0) == quantised


def test_an_engine_takes_no_weights_that_are_stored_otherwise_than_its_own(model, tmp_path):
    plain, quantised = Manifest.read(model), Manifest.read(ensure_start_model(config(model, tmp_path), 0))
    quantised.check_replaces(quantised)
    with pytest.raises(BadWeights, match=r"unknown tensors \(.*_scale_inv"):
        quantised.check_replaces(plain)
    cast = Manifest("cast", quantised.shapes, frozenset())
    with pytest.raises(BadWeights, match="tensors that are FP8 in only one of the two"):
        cast.check_replaces(quantised)
