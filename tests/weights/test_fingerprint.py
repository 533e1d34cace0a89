"""A fingerprint is that of the weights, however they lie, and of no others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dppo_megatron.weights.fingerprint import (
    CHUNK,
    add,
    add_shares,
    bit_sum,
    bit_sums,
    differing,
    group_of,
    module_shares,
    of_workers,
    untold,
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_counts_as_the_fp32_of_the_same_value(dtype):
    """Also infinities, zeros of either sign and every NaN."""
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    assert bit_sums(values[:, None]) == bit_sums(values.float()[:, None])
    strided = values.view(256, 256)[:, ::3]
    assert bit_sum(strided) == bit_sum(strided.contiguous())


def test_the_value_is_what_it_always_was():
    """Servers and trainers of one run may come from two versions of this program."""
    values = torch.tensor([1.0, -2.5, 3e-5])
    assert bit_sum(values) == 0xD820159E0E9791F2
    assert bit_sum(values.bfloat16()) == 0x19716438A7AE3560


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


PLACES = {
    "vllm": lambda rank: {"tp_rank": rank, "tp_size": 4},
    "sglang": lambda rank: {"tp_group": SimpleNamespace(rank_in_group=rank, world_size=4)},
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_the_workers_of_an_engine_add_up(weight, place):
    """Tensor-parallel 4 with 2 heads of keys and values: shards, replicated heads with fewer rows of scales, and norms
    that all hold."""
    ColumnParallelLinear = type("ColumnParallelLinear", (torch.nn.Module,), {})  # the name decides
    RowParallelLinear = type("RowParallelLinear", (torch.nn.Module,), {})
    query, key, value, out = weight[:32], weight[32:40], weight[40:48], weight[48:64]
    scales = {name: tensor[::2, :10] for name, tensor in (("q_proj", query), ("k_proj", key), ("v_proj", value))}
    expected: dict[str, int] = {}
    sent = (("q_proj", query), ("k_proj", key), ("v_proj", value), ("o_proj", out), ("norm", weight[70]))
    for name, tensor in sent:
        add(expected, f"model.layers.0.{name}.weight", tensor)
    for name, tensor in scales.items():
        add(expected, f"model.layers.0.{name}.weight_scale_inv", tensor)

    def shard(rank: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.nn.Parameter:
        of_head = [tensor.chunk(2)[rank // 2] for tensor in (keys, values)]
        return torch.nn.Parameter(torch.cat([queries.chunk(4)[rank], *of_head]))

    def worker(rank: int) -> dict[str, tuple[int, int]]:
        fused, row, norm = ColumnParallelLinear(), RowParallelLinear(), torch.nn.Module()
        fused.weight = shard(rank, query, key, value)
        fused.weight_scale_inv = shard(rank, *scales.values())
        heads = {"num_heads": 2, "num_kv_heads": 1, "head_size": 4, "v_head_size": 4, "num_kv_head_replicas": 2}
        fused.__dict__.update(place(rank), **heads)
        row.weight = torch.nn.Parameter(out.chunk(4, 1)[rank])
        row.__dict__.update(place(rank))
        norm.weight = torch.nn.Parameter(weight[70].clone())
        shares: dict[str, tuple[int, int]] = {}
        for name, module in (("qkv_proj", fused), ("o_proj", row), ("norm", norm)):
            add_shares(shares, module_shares(f"model.layers.0.{name}", module, set()))
        return shares

    workers = [worker(rank) for rank in range(4)]
    assert of_workers(workers) == (expected, [])
    workers[3]["layer 0"] = (workers[3]["layer 0"][0], 1)
    assert of_workers(workers)[1] == ["layer 0"]


def test_what_every_worker_of_sglang_has_is_a_copy(weight):
    """A linear layer that is not sharded names no group."""
    linear = type("ColumnParallelLinear", (torch.nn.Module,), {})()
    linear.weight, linear.tp_group = torch.nn.Parameter(weight), None
    assert module_shares("model.layers.0.shared", linear, set()) == {"layer 0": (0, bit_sum(weight))}


def test_parameters_that_nobody_sends_do_not_count(weight):
    """Of vLLM's latent attention, those made of kv_b_proj; of SGLang's attention in an FP8 model, the cache's scales;
    of vLLM's experts, the router's bias."""
    latent = type("MLAAttention", (torch.nn.Module,), {})()
    latent.W_UV = torch.nn.Parameter(weight)
    assert module_shares("model.layers.0.self_attn.mla_attn", latent, set()) == {}

    attention = torch.nn.Module()
    attention.k_scale = torch.nn.Parameter(torch.tensor(1.0))
    attention.k_scale._skip_weight_check = True
    assert module_shares("model.layers.0.self_attn.attn", attention, set()) == {}

    experts = type("RoutedExperts", (torch.nn.Module,), {})()
    experts.e_score_correction_bias = torch.nn.Parameter(weight[0])
    assert module_shares("model.layers.0.mlp.experts", experts, set()) == {}


def test_experts_have_the_numbers_of_the_model(weight):
    FusedMoE = type("FusedMoE", (torch.nn.Module,), {})
    module = FusedMoE()
    module.w13_weight = torch.nn.Parameter(weight.view(4, 24, 40).clone())
    module.__dict__.update(SimpleNamespace(moe_ep_rank=2, num_fused_shared_experts=1).__dict__)
    shares = module_shares("model.layers.5.mlp.experts", module, set())
    numbers = {f"layer 5 expert {6 + place}": (bit_sum(weight.view(4, 24, 40)[place]), 0) for place in range(3)}
    assert shares == numbers, "the shared one counts on the first worker"


def test_shared_experts_that_every_worker_has_count_once(weight):
    FusedMoE = type("FusedMoE", (torch.nn.Module,), {})
    routed, shared = weight.view(4, 24, 40)[:2], weight.view(4, 24, 40)[3:]
    workers = []
    for rank in range(2):
        module = FusedMoE()
        module.w13_weight = torch.nn.Parameter(torch.cat([routed[rank : rank + 1], shared]))
        module.moe_ep_rank, module.num_fused_shared_experts = rank, 1
        workers.append(module_shares("model.layers.5.mlp.experts", module, set()))
    expected = {f"layer 5 expert {rank}": bit_sum(routed[rank]) for rank in range(2)} | {"layer 5": bit_sum(shared)}
    assert of_workers(workers) == (expected, [])


@pytest.mark.parametrize("gated", [True, False])
def test_what_pads_experts_does_not_count(weight, gated):
    """vLLM allocates more columns than there are and zeroes them once it has processed the layer, not before."""
    gate, up, down = weight.view(3, 2, 16, 40)[..., :20]
    module = type("RoutedExperts", (torch.nn.Module,), {})()
    padded = [torch.full((2, 24, 20), torch.nan) for _ in range(3)]
    for room, tensor in zip(padded, (gate, up, down), strict=True):
        room[:, :16] = tensor
    module.w13_weight = torch.nn.Parameter(torch.cat(padded[:2], dim=1) if gated else padded[0])
    module.w2_weight = torch.nn.Parameter(padded[2].transpose(1, 2))
    module.moe_config = SimpleNamespace(intermediate_size_per_partition_unpadded=16, is_act_and_mul=gated)
    expected: dict[str, int] = {}
    for expert in range(2):
        for tensor in (gate, up, down) if gated else (gate, down):
            add(expected, f"model.layers.3.mlp.experts.{expert}.proj.weight", tensor[expert])
    assert of_workers([module_shares("model.layers.3.mlp.experts", module, set())]) == (expected, [])


def test_weights_that_an_engine_made_anew_are_left_out_and_said_to_be(weight):
    """SGLang on Blackwell scales FP8 weights by powers of two, for DeepGEMM; of CPUs with AMX it packs what it makes of
    kv_b_proj; vLLM pads FP8 experts by what their neighbours hold."""
    linear = type("ColumnParallelLinear", (torch.nn.Module,), {})()
    linear.weight, linear.weight_scale_inv = torch.nn.Parameter(weight), torch.nn.Parameter(weight[0])
    linear.weight_scale_inv.format_ue8m0 = True
    norm, attention = torch.nn.Module(), torch.nn.Module()
    norm.weight, attention.w_kc = torch.nn.Parameter(weight[1]), torch.nn.Parameter(weight)
    experts = type("RoutedExperts", (torch.nn.Module,), {})()
    experts.w13_weight = torch.nn.Parameter(weight.view(4, 24, 40))
    experts.moe_config = SimpleNamespace(tp_shard_with_padding=True)
    shares: dict[str, tuple[int, int] | None] = {}
    for name, module in {
        "model.layers.0.norm": norm,
        "model.layers.0.proj": linear,
        "model.layers.1.norm": norm,
        "model.layers.1.attn": attention,
        "model.layers.2.mlp.experts": experts,
    }.items():
        add_shares(shares, module_shares(name, module, set()))
    held, unequal = of_workers([shares, shares])
    assert unequal == []
    assert untold(held) == ["layer 0", *(f"layer 2 expert {number}" for number in range(4))]
    assert held["layer 1"] == bit_sum(weight[1])
    assert differing({"layer 0": 1, "layer 1": bit_sum(weight[1])}, held) == []
    assert differing({"layer 0": 1, "layer 1": 2}, held) == ["layer 1"]
