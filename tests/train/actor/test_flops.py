"""The formula of model FLOPs agrees with torch's count on real models."""

from collections import Counter

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dppo_megatron.config.model import LoraConfig
from dppo_megatron.hf import read_hf_config
from dppo_megatron.hf.flops import ModelFlops, Work
from tests.support.actor_cases import pack, sequences
from tests.support.actor_ranks import Rank, on_ranks
from tests.train.actor.scenarios.parts import topk

LENGTH, COUNT = 24, 3
ROWS = COUNT * LENGTH
# On CPUs attention computes every pair of a sequence; the model needs the causal ones only.
COMPUTED = Work(ROWS, COUNT * LENGTH**2, ROWS - COUNT)


def batch():
    """COUNT sequences of LENGTH tokens, all but the last of each with loss."""
    parts = [s for s in sequences(40) if len(s["token_ids"]) >= LENGTH][:COUNT]
    cut = [{name: value[:LENGTH].clone() for name, value in part.items()} for part in parts]
    for part in cut:
        part["mask"][:-1], part["mask"][-1] = True, False
    return pack(cut)


def counted(rank: Rank, model: str, **settings) -> tuple[Counter, Counter]:
    """Return the FLOPs of a scoring pass and of an update, by operator. Attention is a product of matrices (bmm)."""
    found = []
    with rank.actor(model, settings=settings) as actor:
        for call in (lambda: actor.logprobs([batch()]), lambda: actor.train_update([batch()], topk())):
            with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
                call()
            by_operator = counter.get_flop_counts()["Global"].items()
            found.append(Counter({str(operator).removeprefix("aten."): count for operator, count in by_operator}))
    return found[0], found[1]


@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe", "deepseek", "moonlight", "glm4_moe"])
@on_ranks(1)
def test_the_flop_formula_equals_the_count_of_torch(rank: Rank, model: str):
    forward, update = counted(rank, model)
    flops = ModelFlops.from_config(read_hf_config(rank.models / model), LoraConfig())
    assert forward.total() == flops.forward(COMPUTED)
    assert update.total() == flops.update(COMPUTED) == 3 * flops.forward(COMPUTED)
    assert forward["bmm"] == flops.pair * COMPUTED.pairs  # attention only


@on_ranks(1)
def test_adapters_are_counted_as_peft_computes_them(rank: Rank):
    """Torch counts two differences.

    The B of a fused layer multiplies every A of the layer: three (query, key, value) or two (gate, up), and uses one.
    The embedding is frozen, so the first layer computes no gradient for it.
    """
    r = 4
    forward, update = counted(rank, "qwen3", lora={"r": r})
    flops = ModelFlops.from_config(read_hf_config(rank.models / "qwen3"), LoraConfig(r=r))
    hidden, layers, qkv, gate_up = 32, 4, 64 + 32 + 32, 2 * 48
    fused = ROWS * layers * 2 * (qkv * 2 * r + gate_up * r)
    first = ROWS * 2 * hidden * (qkv + 3 * r)
    assert forward.total() == flops.forward(COMPUTED) + fused
    assert update.total() == flops.update(COMPUTED) + 3 * fused - first


def test_a_token_uses_the_routed_and_the_shared_experts(models):
    one, all_of_them = (
        ModelFlops.from_config(read_hf_config(models / name), LoraConfig()).row for name in ("only_experts", "deepseek")
    )
    # Four layers: projections, a router of 8, 2 of 8 experts of width 24.
    assert one == 4 * 2 * (32 * (64 + 32 + 32) + 64 * 32 + 32 * 8 + 2 * 3 * 32 * 24)
    attention = 32 * 16 + 16 * 64 + 32 * (16 + 8) + 16 * 4 * (8 + 12) + 48 * 32
    experts = 32 * 8 + (4 + 1) * 3 * 32 * 24
    assert all_of_them == 2 * (4 * attention + 3 * 32 * 48 + 3 * experts)
