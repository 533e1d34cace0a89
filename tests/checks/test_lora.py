"""Settings of LoRA that contradict others."""

from __future__ import annotations

import pytest

from dppo_megatron.checks import settings_problems
from dppo_megatron.config import Config
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
        ({"weight_sync": ADAPTER, "engine": {"kind": "sglang"}}, "only vLLM engines"),
        ({"weight_sync": ADAPTER, "engine": {"quantization": "fp8_block"}}, "FP8 weights are made at each publish"),
        ({"weight_sync": ADAPTER, "engine": {"placement": "colocated"}}, "give their weights back"),
        ({"weight_sync": ADAPTER | {"transport": "broadcast"}}, "adapters travel as files"),
        ({"weight_sync": ADAPTER, "model": {"weights": "other"}}, "the trainer from model.weights"),
        (
            {"model": {"layers": "transformer_engine"}},
            "adapters stand beside Megatron's local layers alone",
        ),
        ({"model": {"fp8": "tensorwise"}}, "model.lora.r = 8: local layers have no FP8; set model.fp8 to none"),
    ],
)
def test_what_cannot_be_combined_is_refused(changes, told):
    problems = settings_problems(config(**changes))
    assert len(problems) == (told is not None)
    assert told is None or told in problems[0]
