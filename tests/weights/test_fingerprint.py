"""A fingerprint depends only on the weights, not on their layout in memory, and other weights have another one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dppo_megatron.rollout.engines.sglang.plugin.dppo_sglang_plugin import weights_fingerprint
from dppo_megatron.weights import fingerprint

NAME = "model.layers.0.self_attn.q_proj.weight"


def module(kind: str = "Module", **attributes: Any) -> torch.nn.Module:
    """A module of a class of this name, which decides; tensors become parameters."""
    made = type(kind, (torch.nn.Module,), {})()
    for name, value in attributes.items():
        setattr(made, name, torch.nn.Parameter(value) if isinstance(value, torch.Tensor) else value)
    return made


def summed(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the sum with places and the sum without."""
    return fingerprint.sum_of(NAME, tensor), fingerprint.bit_sum(tensor)


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(96, 40, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_one_bit_of_one_element_shows(weight, dtype):
    before = weight.to(dtype)
    after = before.clone()
    after.view(torch.uint8)[7, 5] ^= 1
    assert all(a != b for a, b in zip(summed(before), summed(after), strict=True))


def test_changes_of_opposite_elements_do_not_cancel(weight):
    before = weight.bfloat16()
    after = before.clone().view(torch.int16)
    after[0] += 1
    after[1] -= 1
    assert all(a != b for a, b in zip(summed(before), summed(after.view(torch.bfloat16)), strict=True))
    pair = torch.tensor(
        [0.00140380859375, -0.0035552978515625]
    ).bfloat16()  # signs that cost a sum without places as much
    assert fingerprint.bit_sum(pair) == fingerprint.bit_sum(-pair)
    assert fingerprint.sum_of("model.norm.weight", pair) != fingerprint.sum_of("model.norm.weight", -pair)


def test_it_is_the_same_padded_upcast_and_from_any_memory(weight):
    whole = fingerprint.sum_of(NAME, weight)
    assert fingerprint.sum_of(NAME, torch.nn.functional.pad(weight, (0, 8, 0, 4))) == whole
    assert fingerprint.sum_of(NAME, weight.t().contiguous().t()) == whole
    assert fingerprint.sum_of(NAME, weight.bfloat16().float()) == fingerprint.sum_of(NAME, weight.bfloat16())


def exchanged(tensors: list[torch.Tensor], size: int) -> dict[str, list[torch.Tensor]]:
    """Other layers of the same bits: `tensors` are gate, up, q and k, [n, columns] each."""
    gate, up, q, k = tensors
    columns = gate.shape[1]
    return {
        "gate and up": [up, gate, q, k],
        "q and k": [gate, up, k, q],
        "rows of q": [gate, up, q.flip(0), k],
        "heads of q": [gate, up, q.view(-1, 8, columns).flip(0).reshape(q.shape), k],
        "shards of q": [gate, up, q.roll(len(q) // size, 0), k],
        "column shards of up": [gate, up.roll(columns // size, 1), q, k],
        "two rows of k": [gate, up, q, k[[1, 0, *range(2, len(k))]]],
        "two columns of gate": [gate[:, [1, 0, *range(2, columns)]], up, q, k],
        "one value of k and one of up": [gate, *swapped(up, k, q)],
    }


def swapped(up: torch.Tensor, k: torch.Tensor, q: torch.Tensor) -> list[torch.Tensor]:
    up, k = up.clone(), k.clone()
    up[3, 4], k[3, 4] = k[3, 4].item(), up[3, 4].item()
    return [up, q, k]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_places_and_parts_that_are_exchanged_show(dtype):
    tensors = list(torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(0)).to(dtype))

    def of(parts: list[torch.Tensor]) -> dict[str, int]:
        out: dict[str, int] = {}
        for part, tensor in zip(("mlp.gate", "mlp.up", "self_attn.q", "self_attn.k"), parts, strict=True):
            fingerprint.add(out, f"model.layers.3.{part}_proj.weight", tensor)
        return out

    blind = [what for what, other in exchanged(tensors, 2).items() if of(other) == of(tensors)]
    assert blind == []


def test_large_tensors_are_taken_in_pieces(monkeypatch):
    large = torch.arange(2 * fingerprint.CHUNK["cpu"] + 5, dtype=torch.float32)
    assert (
        sum(map(fingerprint.bit_sum, large.split(1000))) % 2**64
        == fingerprint.bit_sum(large)
        == fingerprint.bit_sum(large.flip(0))
    )
    shapes = (large[None], large[:, None])
    in_pieces = [fingerprint.sum_of(NAME, tensor) for tensor in shapes]
    monkeypatch.setitem(fingerprint.CHUNK, "cpu", 1 << 30)
    assert [fingerprint.sum_of(NAME, tensor) for tensor in shapes] == in_pieces


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_counts_as_the_fp32_of_the_same_value(dtype):
    """Also infinities, zeros of either sign and every NaN."""
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    assert [summed(part) for part in values.view(256, 256)] == [summed(part) for part in values.float().view(256, 256)]
    strided = values.view(256, 256)[:, ::3]
    assert summed(strided) == summed(strided.contiguous())


def test_the_value_of_a_fingerprint_never_changes():
    """Checkpoints of adapters store the sum without places; a server that stays up uses the one with places."""
    values = torch.tensor([1.0, -2.5, 3e-5])
    assert fingerprint.bit_sum(values) == 0xD820159E0E9791F2
    assert fingerprint.bit_sum(values.bfloat16()) == 0x19716438A7AE3560
    assert fingerprint.sum_of(NAME, values[None]) == 0x4A1FE12C2F6688E3
    assert fingerprint.sum_of("model.norm.weight", values) == 0x19D4AEE6C970019E


def test_groups():
    assert fingerprint.group_of("model.layers.3.self_attn.q_proj.weight_scale_inv") == "layer 3"
    assert fingerprint.group_of("model.layers.12.mlp.experts.7.up_proj.weight") == "layer 12 expert 7"
    assert fingerprint.group_of("model.layers.12.mlp.shared_experts.up_proj.weight") == "layer 12"
    assert fingerprint.group_of("lm_head.weight") == "lm_head"
    prefix = "base_model.model.model.layers.3.self_attn."
    parts = {"q_proj.weight_scale_inv", "q_proj.bias", "q_proj.lora_A.weight", "q_proj.base_layer.weight"}
    assert {fingerprint.part_of(prefix + name) for name in parts} == {"q_proj"}
    assert fingerprint.part_of("lm_head.weight") == fingerprint.part_of("model.embed_tokens.weight") == ""


def test_differing_layers_are_named_in_order(weight):
    expected, held = {}, {}
    for layer in (10, 2):
        for side in (expected, held):
            fingerprint.add(side, f"model.layers.{layer}.norm.weight", weight)
    fingerprint.add(expected, "model.embed_tokens.weight", weight)
    fingerprint.add(held, "model.embed_tokens.weight", weight)
    fingerprint.add(held, "lm_head.weight", weight)
    assert fingerprint.differing(expected, held) == [], "a tied head"
    held["layer 10"] += 1
    del held["layer 2"]
    assert fingerprint.differing(expected, held) == ["layer 2", "layer 10"]


PLACES = {
    "vllm": lambda rank: {"tp_rank": rank, "tp_size": 4},
    "sglang": lambda rank: {"tp_group": SimpleNamespace(rank_in_group=rank, world_size=4)},
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_the_workers_of_an_engine_add_up(weight, place):
    """Tensor-parallel 4 with 2 heads of keys and values: shards, replicated heads with fewer rows of scales, and norms
    on every worker."""
    query, key, value, out = weight[:32], weight[32:40], weight[40:48], weight[48:64]
    scales = {name: tensor[::2, :10] for name, tensor in (("q_proj", query), ("k_proj", key), ("v_proj", value))}
    expected: dict[str, int] = {}
    sent = (("q_proj", query), ("k_proj", key), ("v_proj", value), ("o_proj", out), ("norm", weight[70]))
    for name, tensor in sent:
        fingerprint.add(expected, f"model.layers.0.{name}.weight", tensor)
    fingerprint.add(expected, "model.embed_tokens.weight", weight[71:])
    for name, tensor in scales.items():
        fingerprint.add(expected, f"model.layers.0.{name}.weight_scale_inv", tensor)

    def shard(rank: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.cat([queries.chunk(4)[rank], keys.chunk(2)[rank // 2], values.chunk(2)[rank // 2]])

    def worker(rank: int, query=query, key=key, out=out) -> dict[str, tuple[int, int]]:
        heads = {"output_partition_sizes": [8, 4, 4], "num_kv_head_replicas": 2}
        scale = shard(rank, *scales.values())
        fused = shard(rank, query, key, value)
        fused = module("ColumnParallelLinear", weight=fused, weight_scale_inv=scale, **heads, **place(rank))
        row = module("RowParallelLinear", weight=out.chunk(4, 1)[rank], **place(rank))
        norm = module(weight=weight[70].clone())
        rows = torch.nn.functional.pad(weight[71:], (0, 0, 0, 3)).chunk(4)[rank]  # of 25; SGLang's names no rank
        first = SimpleNamespace(padded_org_vocab_start_index=7 * rank)
        table = module("VocabParallelEmbedding", weight=rows, tp_size=4, shard_indices=first)
        shares: dict[str, tuple[int, int]] = {}
        for name, part in (("qkv_proj", fused), ("o_proj", row), ("norm", norm)):
            fingerprint.add_shares(shares, fingerprint.module_shares(f"model.layers.0.{name}", part, set()))
        return shares | fingerprint.module_shares("model.embed_tokens", table, set())

    workers = [worker(rank) for rank in range(4)]
    assert fingerprint.join_workers(workers) == (expected, [])
    faults = {
        "shards of q": [worker(rank, query=query.roll(8, 0)) for rank in range(4)],
        "shards of o": [worker(rank, out=out.roll(10, 1)) for rank in range(4)],
        "a head of k": [worker(rank, key=key.roll(4, 0)) for rank in range(4)],
        "rows of q": [worker(rank, query=query.flip(0)) for rank in range(4)],
    }
    assert [fault for fault, wrong in faults.items() if fingerprint.join_workers(wrong) == (expected, [])] == []
    workers[3]["layer 0"] = (workers[3]["layer 0"][0], 1)
    assert fingerprint.join_workers(workers)[1] == ["layer 0"]


def test_gated_delta_net_is_summed_like_the_tensors_that_vllm_fuses(weight):
    """Queries, keys and values are one tensor in Hugging Face and three parts in vLLM, which shards them separately."""
    qkv, z, b, a = weight[:32], weight[32:48], weight[48:52], weight[52:56]
    logs, bias = weight[0, :4].clone(), weight[1, :4].clone()
    names = {"in_proj_qkv": qkv, "in_proj_z": z, "in_proj_b": b, "in_proj_a": a}
    expected: dict[str, int] = {}
    for name, tensor in names.items():
        fingerprint.add(expected, f"model.layers.2.linear_attn.{name}.weight", tensor)
    for name, tensor in {"A_log": logs, "dt_bias": bias}.items():
        fingerprint.add(expected, f"model.layers.2.linear_attn.{name}", tensor)

    def worker(rank: int, size: int, qkv=qkv, a=a, b=b, logs=logs, bias=bias) -> dict[str, tuple[int, int]]:
        parts = [*qkv.split([8, 8, 16]), z]
        fused = torch.cat([part.chunk(size)[rank] for part in parts])
        sizes = [len(part) // size for part in parts]
        at = {"tp_rank": rank, "tp_size": size}
        small = torch.cat([part.chunk(size)[rank] for part in (b, a)])
        modules = {
            ".in_proj_qkvz": module("ColumnParallelLinear", weight=fused, output_partition_sizes=sizes, **at),
            ".in_proj_ba": module("ColumnParallelLinear", weight=small, output_partition_sizes=[4 // size] * 2, **at),
            "": module("GatedDeltaNetAttention", A_log=logs.chunk(size)[rank], dt_bias=bias.chunk(size)[rank], **at),
        }
        shares: dict[str, tuple[int, int]] = {}
        for name, part in modules.items():
            fingerprint.add_shares(shares, fingerprint.module_shares(f"model.layers.2.linear_attn{name}", part, set()))
        return shares

    for size in (1, 2):
        assert fingerprint.join_workers([worker(rank, size) for rank in range(size)]) == (expected, [])
        for wrong in ({"qkv": qkv.roll(8, 0)}, {"a": b, "b": a}, {"logs": bias, "bias": logs}):
            assert fingerprint.join_workers([worker(rank, size, **wrong) for rank in range(size)])[0] != expected
    convolution = module("ColumnParallelLinear", weight=weight[:, None], tp_rank=0, tp_size=2)
    assert fingerprint.module_shares("model.layers.2.linear_attn.conv1d", convolution, set()) == {"layer 2": None}


def test_a_weight_that_every_sglang_worker_has_is_a_copy(weight):
    """A linear layer that is not sharded names no group."""
    linear = module("ColumnParallelLinear", weight=weight, tp_group=None)
    assert fingerprint.module_shares("model.layers.0.shared", linear, set()) == {
        "layer 0": (0, fingerprint.sum_of("layers.0.shared.weight", weight))
    }


def test_parameters_that_are_never_sent_do_not_count(weight):
    """They are made of kv_b_proj in vLLM's latent attention, the cache's scales in SGLang's attention of an FP8 model,
    and the router's bias in vLLM's experts."""
    latent = module("MLAAttention", W_UV=weight)
    attention = module(k_scale=torch.tensor(1.0))
    attention.k_scale._skip_weight_check = True
    experts = module("RoutedExperts", e_score_correction_bias=weight[0])
    for name, part in (("self_attn.mla_attn", latent), ("self_attn.attn", attention), ("mlp.experts", experts)):
        assert fingerprint.module_shares(f"model.layers.0.{name}", part, set()) == {}


def fused(gate_up: torch.Tensor) -> int:
    """Return the sum of an expert's gate and up projection."""
    sums = [
        fingerprint.sum_of(f"layers.0.{n}_proj.weight", part)
        for n, part in zip(("gate", "up"), gate_up.chunk(2), strict=True)
    ]
    return sum(sums) % 2**64


def test_experts_have_the_numbers_of_the_model(weight):
    experts = module("FusedMoE", w13_weight=weight.view(4, 24, 40).clone(), moe_ep_rank=2, num_fused_shared_experts=1)
    shares = fingerprint.module_shares("model.layers.5.mlp.experts", experts, set())
    numbers = {f"layer 5 expert {6 + place}": (fused(weight.view(4, 24, 40)[place]), 0) for place in range(3)}
    assert shares == numbers, "the shared one counts on the first worker"


def test_shared_experts_that_every_worker_has_count_once(weight):
    routed, shared = weight.view(4, 24, 40)[:2], weight.view(4, 24, 40)[3:]
    workers = []
    for rank in range(2):
        weights = torch.cat([routed[rank : rank + 1], shared])
        experts = module("FusedMoE", w13_weight=weights, moe_ep_rank=rank, num_fused_shared_experts=1)
        workers.append(fingerprint.module_shares("model.layers.5.mlp.experts", experts, set()))
    expected = {f"layer 5 expert {rank}": fused(routed[rank]) for rank in range(2)} | {"layer 5": fused(shared[0])}
    assert fingerprint.join_workers(workers) == (expected, [])


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_shards_of_experts_add_up_without_their_padding(weight, gated, size):
    """vLLM allocates more columns than there are and zeroes them once it has processed the layer, not before."""
    gate, up, down = weight.view(3, 2, 16, 40)[..., :20]
    down = down.transpose(1, 2)  # [2, 20, 16]
    used, workers = 16 // size, []
    for rank in range(size):
        padded = torch.full((2, 2, used + 8, 20), torch.nan)
        padded[:, :, :used] = torch.stack([part[:, rank * used :][:, :used] for part in (gate, up)], 1)
        w13 = padded.flatten(1, 2) if gated else padded[:, 1].contiguous()
        w2 = torch.full((2, 20, used + 8), torch.nan)
        w2[..., :used] = down[..., rank * used :][..., :used]
        config = {"intermediate_size_per_partition_unpadded": used, "is_act_and_mul": gated, "tp_rank": rank}
        experts = module("RoutedExperts", w13_weight=w13, w2_weight=w2, moe_config=SimpleNamespace(**config))
        workers.append(fingerprint.module_shares("model.layers.3.mlp.experts", experts, set()))
    expected: dict[str, int] = {}
    for expert in range(2):
        for name, tensor in (("gate", gate), ("up", up), ("down", down))[0 if gated else 1 :]:
            fingerprint.add(expected, f"model.layers.3.mlp.experts.{expert}.{name}_proj.weight", tensor[expert])
    assert fingerprint.join_workers(workers) == (expected, [])


def test_weights_that_an_engine_transformed_are_left_out_and_listed(weight):
    """SGLang on Blackwell scales FP8 weights by powers of two, for DeepGEMM; on CPUs with AMX it packs weights and the
    parts of kv_b_proj; for one kernel it reorders experts. vLLM pads FP8 experts with their neighbours' values."""
    linear = module("ColumnParallelLinear", weight=weight, weight_scale_inv=weight[0])
    linear.weight_scale_inv.format_ue8m0 = True
    norm, attention = module(weight=weight[1]), module(w_kc=weight)
    padding = SimpleNamespace(tp_shard_with_padding=True)
    experts = module("RoutedExperts", w13_weight=weight.view(4, 24, 40), moe_config=padding)
    packed = module("ColumnParallelLinear", weight=weight, use_intel_amx_backend=True)
    up_first = SimpleNamespace(load_up_proj_weight_first=True)
    first = module("ColumnParallelLinear", weight=weight, quant_method=up_first)
    shares: dict[str, tuple[int, int] | None] = {}
    for name, part in {
        "model.layers.0.norm": norm,
        "model.layers.0.proj": linear,
        "model.layers.1.norm": norm,
        "model.layers.1.attn": attention,
        "model.layers.2.mlp.experts": experts,
        "model.layers.3.packed": packed,
        "model.layers.4.first": first,
    }.items():
        fingerprint.add_shares(shares, fingerprint.module_shares(name, part, set()))
    held, unequal = fingerprint.join_workers([shares, shares])
    assert unequal == []
    moved = [f"layer {number}" for number in (3, 4)]
    assert fingerprint.untold(held) == ["layer 0", *(f"layer 2 expert {number}" for number in range(4)), *moved]
    norm = fingerprint.sum_of("layers.1.norm.weight", weight[1])
    assert held["layer 1"] == norm
    assert fingerprint.differing({"layer 0": 1, "layer 1": norm}, held) == []
    assert fingerprint.differing({"layer 0": 1, "layer 1": 2}, held) == ["layer 1"]


def test_latent_attention_is_split_where_sglang_does_not_tell(weight):
    """Its fused projection names no sizes; the model's config has the first. Scales have fewer rows."""
    linear = module("ReplicatedLinear", weight=weight, weight_scale_inv=weight[:6], output_size=96)
    expected: dict[str, int] = {}
    for name, rows, scales in (("q_a_proj", weight[:32], weight[:2]), ("kv_a_proj_with_mqa", weight[32:], weight[2:6])):
        fingerprint.add(expected, f"model.layers.1.self_attn.{name}.weight", rows)
        fingerprint.add(expected, f"model.layers.1.self_attn.{name}.weight_scale_inv", scales)
    layers = torch.nn.ModuleList([module(), module(fused_qkv_a_proj_with_mqa=linear)])
    model = module(layers=layers, config=SimpleNamespace(q_lora_rank=32))
    assert fingerprint.join_workers([weights_fingerprint(model)]) == (expected, [])
