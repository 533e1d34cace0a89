"""Settings of LoRA that contradict others."""

from __future__ import annotations

import pytest

from dppo_megatron.checks import objective, serving, settings_problems
from dppo_megatron.config import Config
from dppo_megatron.hf import parse_hf_config
from tests.support.actor_cases import DEEPSEEK, QWEN3, QWEN3_MOE
from tests.support.configs import make_config

ADAPTER = {"lora": "adapter"}


def config(r: int = 8, **sections: dict) -> Config:
    model = {"lora": {"r": r}} | sections.pop("model", {})
    return make_config(model={"path": "unused", **model}, **sections)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, None),
        ({"weight_sync": ADAPTER}, None),
        ({"r": 0, "weight_sync": ADAPTER}, "the run trains no adapters (model.lora.r = 0)"),
        ({"r": 1024, "weight_sync": ADAPTER}, "engines take adapters of r at most 512"),
        ({"weight_sync": ADAPTER, "engine": {"kind": "sglang"}}, None),
        ({"weight_sync": ADAPTER, "engine": {"quantization": "fp8_block"}}, "FP8 weights are made at each publish"),
        ({"weight_sync": ADAPTER, "engine": {"placement": "colocated"}}, "give their weights back"),
        ({"weight_sync": ADAPTER | {"transport": "broadcast"}}, "adapters travel as files"),
        ({"weight_sync": ADAPTER, "model": {"weights": "other"}}, "the trainer from model.weights"),
        (
            {"model": {"layers": "transformer_engine"}},
            "adapters stand beside Megatron's local layers alone",
        ),
        ({"weight_sync": ADAPTER | {"full_every": 2}}, "adapters are published as they are"),
        ({"weight_sync": {"full_every": 2}}, None),
        ({"weight_sync": {"full_every": 2, "transport": "broadcast"}}, "a broadcast is of the whole"),
        ({"weight_sync": {"full_every": 2}, "engine": {"placement": "colocated"}}, "an actor that has left its device"),
        ({"model": {"fp8": "tensorwise"}}, "model.lora.r = 8: local layers have no FP8; set model.fp8 to none"),
    ],
)
def test_what_cannot_be_combined_is_refused(changes, told):
    problems = settings_problems(config(**changes))
    assert len(problems) == (told is not None)
    assert told is None or told in problems[0]


@pytest.mark.parametrize(("model", "refused"), [(QWEN3, False), (QWEN3_MOE, True), (DEEPSEEK, True)])
def test_engines_take_adapters_of_dense_models_alone(model, refused):
    short = {"data": {"train": "t", "max_prompt_tokens": 32}, "rollout": {"max_response_tokens": 32}}
    found = serving.problems(config(weight_sync=ADAPTER, **short), parse_hf_config(model, "x"))
    assert any("adapters of experts or of latent attention" in problem for problem in found) == refused
    assert serving.problems(config(**short), parse_hf_config(model, "x")) == []


@pytest.mark.parametrize(
    ("targets", "lost"),
    [
        (["q_proj", "v_proj", "o_proj"], False),
        (["gate_proj", "down_proj"], False),
        (["q_proj", "k_proj"], True),
        (["v_proj"], True),
        (["k_proj"], True),
        (["q_proj", "v_proj", "up_proj"], True),
        (["q_proj", "layers.0.self_attn.v_proj"], True),
    ],
)
def test_parts_of_fused_layers_that_sglang_would_not_take_are_refused(targets, lost):
    for kind in ("vllm", "sglang"):
        engine = {"max_model_len": 64, "kind": kind}
        made = config(weight_sync=ADAPTER, engine=engine, model={"lora": {"r": 8, "targets": targets}})
        found = serving.problems(made, parse_hf_config(QWEN3, "x"))
        assert any("of layers that it fuses" in problem for problem in found) == (lost and kind == "sglang")


@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_a_reference_must_be_what_training_starts_from(coefficient):
    settings = {"reference_kl": "k3", "reference_kl_coefficient": coefficient} if coefficient else {}
    made = config(model={"lora": {"r": 8, "adapter": "other"}}, objective={"settings": settings})
    found = objective.problems(made, [])
    assert any("model.lora.adapter = other: the reference of" in problem for problem in found) == bool(coefficient)
    assert objective.problems(config(objective={"settings": settings}), []) == []
