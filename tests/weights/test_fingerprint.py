"""A fingerprint is that of the weights, however they lie, and of no others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dppo_megatron.weights.fingerprint import (
    CHUNK,
    add,
    bit_sum,
    bit_sums,
    differing,
    group_of,
    module_shares,
    of_workers,
)


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(96, 40, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_one_bit_of_one_element_shows(weight, dtype):
    before = weight.to(dtype)
    after = before.clone()
    after.view(torch.uint8)[7, 5] ^= 1
    assert bit_sum(before) != bit_sum(after)


def test_changes_of_opposite_elements_do_not_cancel(weight):
    before = weight.bfloat16()
    after = before.clone().view(torch.int16)
    after[0] += 1
    after[1] -= 1
    assert bit_sum(before) != bit_sum(after.view(torch.bfloat16))


def test_it_is_the_same_fused_sharded_permuted_padded_and_upcast(weight):
    whole = bit_sum(weight)
    first, second = weight[:30], weight[30:]
    assert (bit_sum(first) + bit_sum(second)) % 2**64 == whole
    assert bit_sum(weight.t().contiguous().view(48, 80)) == whole
    assert bit_sum(torch.nn.functional.pad(weight, (0, 8, 0, 4))) == whole
    assert bit_sum(weight.flip(0)) == whole
    assert bit_sum(weight.bfloat16().float()) == bit_sum(weight.bfloat16())


def test_large_tensors_are_taken_in_pieces():
    large = torch.arange(2 * CHUNK["cpu"] + 5, dtype=torch.float32)
    pieces = large.split(1000)
    assert sum(map(bit_sum, pieces)) % 2**64 == bit_sum(large)
    assert bit_sums(large[:-5].view(2, -1)) == [bit_sum(half) for half in large[:-5].view(2, -1)]


def test_groups():
    assert group_of("model.layers.3.self_attn.q_proj.weight_scale_inv") == "layer 3"
    assert group_of("model.layers.12.mlp.experts.7.up_proj.weight") == "layer 12 expert 7"
    assert group_of("model.layers.12.mlp.shared_experts.up_proj.weight") == "layer 12"
    assert group_of("lm_head.weight") == "lm_head"


def test_what_differs_is_named_in_order(weight):
    expected, held = {}, {}
    for layer in (10, 2):
        for side in (expected, held):
            add(side, f"model.layers.{layer}.norm.weight", weight)
    add(expected, "model.embed_tokens.weight", weight)
    add(held, "model.embed_tokens.weight", weight)
    add(held, "lm_head.weight", weight)
    assert differing(expected, held) == [], "a tied head"
    held["layer 10"] += 1
    del held["layer 2"]
    assert differing(expected, held) == ["layer 2", "layer 10"]


def test_the_workers_of_an_engine_add_up(weight):
    """Tensor-parallel 4 with 2 heads of keys and values: shards, replicated heads, and norms that all hold."""
    ColumnParallelLinear = type("ColumnParallelLinear", (torch.nn.Module,), {})  # the name decides
    heads, size = 8, 4
    query, key = weight[: heads * size], weight[32:40]
    expected: dict[str, int] = {}
    for name, tensor in (("q_proj", query), ("k_proj", key), ("norm", weight[50])):
        add(expected, f"model.layers.0.{name}.weight", tensor)

    def worker(rank: int) -> dict[str, tuple[int, int]]:
        linear, norm = ColumnParallelLinear(), torch.nn.Module()
        shard = torch.cat([query[rank * 8 : (rank + 1) * 8], key[rank // 2 * 4 : rank // 2 * 4 + 4]])
        linear.weight = torch.nn.Parameter(shard)
        linear.__dict__.update(tp_size=4, tp_rank=rank, num_heads=2, head_size=4, num_kv_head_replicas=2)
        norm.weight = torch.nn.Parameter(weight[50].clone())
        shares = module_shares("model.layers.0.qkv_proj", linear, set())
        own, copy = shares["layer 0"]
        more = module_shares("model.layers.0.norm", norm, set())["layer 0"]
        return {"layer 0": ((own + more[0]) % 2**64, (copy + more[1]) % 2**64)}

    workers = [worker(rank) for rank in range(4)]
    assert of_workers(workers) == (expected, [])
    workers[3]["layer 0"] = (workers[3]["layer 0"][0], 1)
    assert of_workers(workers)[1] == ["layer 0"]


def test_experts_have_the_numbers_of_the_model(weight):
    FusedMoE = type("FusedMoE", (torch.nn.Module,), {})
    module = FusedMoE()
    module.w13_weight = torch.nn.Parameter(weight.view(4, 24, 40).clone())
    module.__dict__.update(SimpleNamespace(moe_ep_rank=2, num_fused_shared_experts=1).__dict__)
    shares = module_shares("model.layers.5.mlp.experts", module, set())
    assert set(shares) == {"layer 5 expert 6", "layer 5 expert 7", "layer 5 expert 8", "layer 5"}
    assert shares["layer 5"][0] == bit_sum(weight.view(4, 24, 40)[3])
