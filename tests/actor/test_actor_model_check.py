"""`check_model`: every reason at once, before anything is started."""

from __future__ import annotations

import pytest
from actor_cases import make_config, write_config

from dppo_megatron.actor import LayoutError, check_model, init_layout, padded_vocab_size


def test_a_model_that_fits(tmp_path):
    assert check_model(make_config(write_config(tmp_path), parallel={"tensor": 2, "world_size": 2})) == []


@pytest.mark.parametrize(
    ("changes", "parallel", "settings", "expected"),
    [
        ({}, {"tensor": 4, "world_size": 4}, {}, ["does not divide 2 key-value heads; use one of 1, 2"]),
        (
            {"intermediate_size": 51},
            {"tensor": 4, "world_size": 4, "pipeline": 3},
            {},
            ["2 key-value heads", "intermediate_size = 51", "3 stages do not divide 4 layers"],
        ),
        ({}, {"pipeline": 2, "virtual_pipeline": 4, "world_size": 2}, {}, ["8 stages do not divide 4 layers"]),
        ({}, {"expert": 2, "world_size": 2}, {}, ["the model has no experts"]),
        ({}, {}, {"layers": "transformer_engine"}, ["needs a CUDA device"]),
        ({"architectures": ["FooForCausalLM"]}, {}, {}, ["FooForCausalLM", "Qwen3ForCausalLM"]),
        ({"quantization_config": {"quant_method": "fp8"}}, {}, {}, ["quantised weights"]),
    ],
)
def test_every_problem_is_named(tmp_path, changes, parallel, settings, expected):
    problems = check_model(make_config(write_config(tmp_path, **changes), parallel=parallel, **settings))
    for text in expected:
        assert any(text in problem for problem in problems), problems
    assert all(" = " in problem and ": " in problem for problem in problems)


def test_missing_directory_and_foreign_files(tmp_path):
    (missing,) = check_model(make_config(tmp_path / "nowhere"))
    assert "no such directory" in missing
    assert "model.path" in missing
    (foreign,) = check_model(make_config(tmp_path))
    assert "config.json" in foreign


@pytest.mark.parametrize(
    ("vocab", "tensor", "padded"),
    [(32, 2, 32), (37, 2, 38), (37, 1, 37), (151936, 1, 151936), (151936, 2, 152064), (151936, 8, 152576)],
)
def test_padded_vocabulary(vocab, tensor, padded):
    assert padded_vocab_size(vocab, tensor) == padded


def test_processes_that_do_not_fit_the_layout(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(LayoutError, match=r"parallel.world_size = 2: 3 trainer processes"):
        init_layout(make_config(tmp_path, parallel={"world_size": 2}))
    with pytest.raises(LayoutError, match="not a multiple of tensor x pipeline x context = 2"):
        init_layout(make_config(tmp_path, parallel={"world_size": 3, "tensor": 2}))
