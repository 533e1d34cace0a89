"""The formula of model FLOPs agrees with torch's count on real models."""

from __future__ import annotations

import pytest

from dppo_megatron.config.model import LoraConfig
from dppo_megatron.hf import read_hf_config
from dppo_megatron.hf.flops import ModelFlops, Work
from tests.actor.scenarios import flops as scenario
from tests.actor.scenarios.flops import COUNT, LENGTH

ROWS = COUNT * LENGTH
# On CPUs attention computes every pair of a sequence; the model needs the causal ones only.
COMPUTED = Work(ROWS, COUNT * LENGTH**2, ROWS - COUNT)


@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe", "deepseek", "moonlight", "glm4_moe"])
def test_the_formula_is_what_torch_counts(one_rank, models, model):
    counted, flops = one_rank(scenario.counted)[model], ModelFlops.of(read_hf_config(models / model), LoraConfig())
    assert sum(counted["forward"].values()) == flops.forward(COMPUTED)
    assert sum(counted["update"].values()) == flops.update(COMPUTED) == 3 * flops.forward(COMPUTED)
    assert counted["forward"]["bmm"] == flops.pair * COMPUTED.pairs  # attention only


def test_adapters_are_counted_as_peft_computes_them(one_rank, models):
    """Torch counts two differences.

    The B of a fused layer multiplies every A of the layer: three (query, key, value) or two (gate, up), and uses one.
    The embedding is frozen, so the first layer computes no gradient for it.
    """
    counted, r = one_rank(scenario.counted)["lora"], 4
    flops = ModelFlops.of(read_hf_config(models / "qwen3"), LoraConfig(r=r))
    hidden, layers, qkv, gate_up = 32, 4, 64 + 32 + 32, 2 * 48
    fused = ROWS * layers * 2 * (qkv * 2 * r + gate_up * r)
    first = ROWS * 2 * hidden * (qkv + 3 * r)
    assert sum(counted["forward"].values()) == flops.forward(COMPUTED) + fused
    assert sum(counted["update"].values()) == flops.update(COMPUTED) + 3 * fused - first


def test_a_token_uses_the_routed_and_the_shared_experts(models):
    one, all_of_them = (
        ModelFlops.of(read_hf_config(models / name), LoraConfig()).row for name in ("only_experts", "deepseek")
    )
    # Four layers: projections, a router of 8, 2 of 8 experts of width 24.
    assert one == 4 * 2 * (32 * (64 + 32 + 32) + 64 * 32 + 32 * 8 + 2 * 3 * 32 * 24)
    attention = 32 * 16 + 16 * 64 + 32 * (16 + 8) + 16 * 4 * (8 + 12) + 48 * 32
    experts = 32 * 8 + (4 + 1) * 3 * 32 * 24
    assert all_of_them == 2 * (4 * attention + 3 * 32 * 48 + 3 * experts)
