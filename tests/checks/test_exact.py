"""What `engine.exact` is refused with: one sentence each, which names the setting to change."""

from __future__ import annotations

import pytest
import torch

from dppo_megatron.checks import exact, settings_problems
from dppo_megatron.hf import parse_hf_config
from tests.support.actor_cases import DEEPSEEK, QWEN3, QWEN3_MOE
from tests.support.configs import make_config


def config(**sections: dict):
    engine = {"exact": True, "dtype": "bf16"} | sections.pop("engine", {})
    return make_config(engine=engine, **sections)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, None),
        ({"parallel": {"tensor": 2, "world_size": 2, "sequence": True}}, None),
        ({"engine": {"kind": "sglang", "dtype": "fp32"}, "model": {"dtype": "fp32"}}, None),
        ({"model": {"fp32_head": True}}, None),
        ({"engine": {"dtype": "fp32"}}, "set engine.dtype (now fp32) to bf16"),
        ({"engine": {"dtype": "fp16"}}, "set engine.dtype (now fp16) to bf16"),
        ({"engine": {"quantization": "fp8_block_emulated"}}, "set engine.quantization and model.fp8 to none"),
        ({"model": {"fp8": "blockwise"}}, "set engine.quantization and model.fp8 to none"),
        ({"model": {"layers": "transformer_engine"}}, "set model.layers to local or auto"),
        ({"model": {"logits": "fused"}}, "set model.logits to stored"),
        ({"model": {"lora": {"r": 4}}}, "set model.lora.r to 0"),
        ({"model": {"batch_invariant_head": True}}, "set model.batch_invariant_head to false"),
        ({"engine": {"tensor_parallel": 2}}, "set engine.tensor_parallel to 1"),
        ({"parallel": {"tensor": 4, "world_size": 4}}, "set parallel.tensor (now 4) to 1 or 2"),
        ({"parallel": {"context": 2, "world_size": 2}}, "set parallel.context to 1"),
        ({"rollout": {"top_p": 0.9, "top_k": 8}}, "set them to 1, -1 and 0"),
    ],
)
def test_what_cannot_be_combined_is_refused(changes, told):
    problems = settings_problems(config(**{section: dict(settings) for section, settings in changes.items()}))
    assert len(problems) == (told is not None)
    assert told is None or told in problems[0]
    assert settings_problems(make_config()) == []


def of_model(directory: dict, *, elsewhere: bool = False, **sections: dict) -> list[str]:
    return exact.model_problems(config(**sections), parse_hf_config(directory, "x"), elsewhere=elsewhere)


def test_models_whose_operators_both_sides_do_not_share(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert of_model(QWEN3) == []
    assert "router, experts' products" in of_model(QWEN3_MOE)[0]
    assert "latent attention" in of_model(DEEPSEEK)[-1]


def test_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "run without GPUs" in of_model(QWEN3)[0]
    assert of_model(QWEN3, elsewhere=True, slurm={"gpus_per_node": 0}) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "run without GPUs" in of_model(QWEN3, elsewhere=True)[0]


def test_without_it_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert exact.model_problems(make_config(), parse_hf_config(QWEN3_MOE, "x"), elsewhere=False) == []
