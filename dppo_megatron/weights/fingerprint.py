"""Compute weight fingerprints: a number for each layer, each expert and each module outside the layers, by HF name.

A fingerprint is a sum over all elements, modulo 2**64. An element adds

    mix(bits, column) * factor(row) * factor(projection)        projection: q_proj, gate_proj ...

Rows and columns count in the whole tensor in Hugging Face's layout, and zeros add 0. Fused, sharded and padded weights
therefore have the whole tensor's sum. A single changed bit changes the sum, and so do exchanged rows, columns, shards
or projections. Floats of 16 and 8 bits count as fp32 with an equal value.

Depends only on torch, because SGLang servers also import this module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

MODULUS = 1 << 64
CHUNK = {"cpu": 1 << 17, "cuda": 1 << 24}  # elements mixed at a time: they fit in a CPU's cache

_LAYER = re.compile(r"\blayers\.(\d+)\.")
_EXPERT = re.compile(r"\bexperts\.(\d+)\.")
_STACKED = re.compile(r"\bexperts\.(\w+_proj)(_bias)?$")  # gpt-oss: all experts in a layer in a single tensor
_PARAMETER = re.compile(r"(\.base_layer)?(\.lora_[AB])?\.(weight|bias)\w*$")
_MIX = (0x9E3779B97F4A7C15 - MODULUS, 0xBF58476D1CE4E5B9 - MODULUS)  # odd, as signed numbers; from splitmix64

_FUSED = {  # projections that an engine stacks into a single weight
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    # The first weight has three parts that engines shard separately.
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_qkv", "in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
_EXPERTS = {"RoutedExperts", "FusedMoE"}
_SHARDED = {
    "ColumnParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "GatedDeltaNetAttention",
    "OAIAttention",  # vLLM: the gpt-oss sinks, one for each head
}
_DERIVED = {"MLAAttention"}  # vLLM: all parameters, W_UV and W_UK_T, are computed from kv_b_proj
_DERIVED_NAMES = {"w_kc", "w_vc"}  # SGLang: also from kv_b_proj; parameters where a CPU with AMX packs them

# Fingerprints by group: {"layer 3": 0x5f...}. None = the engine cannot compute the fingerprint, because it changed the
# loaded weights.
Fingerprint = dict[str, int | None]
# A worker's sums by group: (sum of the worker's shards, sum of tensors that every worker has whole). None as above.
# Example: two workers with {"layer 0": (5, 7)} and {"layer 0": (6, 7)} give {"layer 0": 5 + 6 + 7}.
WorkerSums = dict[str, tuple[int, int] | None]


def group_of(name: str) -> str:
    """Return a tensor's group: "layer 3", "layer 3 expert 5", or the module name outside the layers."""
    layer, expert = _LAYER.search(name), _EXPERT.search(name)
    if layer is None:
        return name.rpartition(".")[0].rpartition(".")[2]
    return f"layer {layer[1]} expert {expert[1]}" if expert else f"layer {layer[1]}"


def part_of(name: str) -> str:
    """Return a tensor's name within the layer; "" outside the layers.

    Example: "q_proj" for "model.layers.3.self_attn.q_proj.weight", "A_log" for "model.layers.3.linear_attn.A_log".
    """
    return _PARAMETER.sub("", name).rpartition(".")[2] if _LAYER.search(name) else ""


def bit_sum(tensor: torch.Tensor) -> int:
    """Return the sum over all elements' bits in any order, modulo 2**64. Adapter checkpoints store this sum."""
    return int(_row_sums(tensor, None).sum()) * _MIX[1] % MODULUS if tensor.numel() else 0


def sum_of(name: str, tensor: torch.Tensor) -> int:
    """Return how much a tensor with Hugging Face's name, rows and columns adds to the group sum, modulo 2**64."""
    return _placed(part_of(name), _row_sums(tensor))[0] if tensor.numel() else 0


def add(fingerprint: dict[str, int], name: str, tensor: torch.Tensor) -> None:
    """Add a tensor to `fingerprint`. `name` is the Hugging Face name."""
    for part_name, part in expert_parts(name, tensor):
        group = group_of(part_name)
        rows = part.mT if part_name != name and part.ndim > 1 else part
        fingerprint[group] = (fingerprint.get(group, 0) + sum_of(part_name, rows)) % MODULUS


def expert_parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each expert's part if `tensor` stacks all experts in a layer, as in gpt-oss, or else the tensor.

    Example: "layers.0.mlp.experts.down_proj_bias" [2, 5] gives "layers.0.mlp.experts.0.down_proj.bias" [5] and likewise
    for expert 1. A weight remains [inputs, outputs].
    """
    stacked = _STACKED.search(name)
    if stacked is None:
        yield name, tensor
        return
    for expert, part in enumerate(tensor):
        yield f"{name[: stacked.start(1)]}{expert}.{stacked[1]}.{'bias' if stacked[2] else 'weight'}", part


@torch.no_grad()
def _row_sums(tensor: torch.Tensor, left: int | None = 0) -> torch.Tensor:
    """Return the row sums [n] int64 of `tensor` [n, ...].

    left: number of the first column in the whole tensor. None: the sums do not depend on the column order.
    """
    rows = tensor.detach().reshape(len(tensor) if tensor.ndim else 1, -1)
    columns = torch.arange(rows.shape[1], device=rows.device)
    factor = torch.full_like(columns, _MIX[0]) if left is None else _odd(columns + left)
    chunk = CHUNK.get(rows.device.type, CHUNK["cuda"])
    sums = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    height, width = max(1, chunk // rows.shape[1]), min(chunk, rows.shape[1])
    room = torch.empty(2, min(height, len(rows)) * width, dtype=torch.int64, device=rows.device)
    for top in range(0, len(rows), height):
        for span in (slice(start, start + chunk) for start in range(0, rows.shape[1], chunk)):
            sums[top : top + height] += _mix(rows[top : top + height, span], factor[span], room).sum(1)
    return sums


def _mix(part: torch.Tensor, factor: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """Mix the bits of each element, read as fp32, into int64 in the buffer `room` [2, >= elements]. Zeros give 0."""
    mixed, upper = (buffer[: part.numel()].view(part.shape) for buffer in room)
    if part.dtype == torch.bfloat16:  # bf16 is the upper half of fp32, so these 16 bits suffice
        mixed.copy_(part.view(torch.int16)).mul_(factor << 16)
    else:
        mixed.copy_(part.float().view(torch.int32) if part.is_floating_point() else part).mul_(factor)
    torch.bitwise_right_shift(mixed, 29, out=upper)
    return mixed.bitwise_xor_(upper)


def _odd(places: torch.Tensor) -> torch.Tensor:
    """Return an odd factor for each row or column. A product with an odd factor loses no bit."""
    mixed = (places + 1) * _MIX[0]
    return (mixed ^ (mixed >> 29)) * _MIX[1] | 1


def _salt(part: str) -> int:
    """Return an odd factor for a name. It is 1 outside the layers, so a tied head has the embedding's sum."""
    salt = 0
    for start in range(0, len(part), 8):
        salt = (salt + int.from_bytes(part[start : start + 8].encode(), "little")) * _MIX[0] % MODULUS
    return salt | 1


def _placed(part: str, sums: torch.Tensor, row: int = 0) -> list[int]:
    """Return the sums of tensors with row sums `sums` [..., n], which begin at row `row` in the whole tensor."""
    total = (sums * _odd(torch.arange(row, row + sums.shape[-1], device=sums.device))).sum(-1)
    return [value * _salt(part) % MODULUS for value in total.reshape(-1).tolist()]


def merged(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add up fingerprints of disjoint weights."""
    whole: dict[str, int] = {}
    for part in parts:
        for group, value in part.items():
            whole[group] = (whole.get(group, 0) + value) % MODULUS
    return whole


def join_workers(workers: Iterable[WorkerSums]) -> tuple[Fingerprint, list[str]]:
    """Return the engine's fingerprint, and the groups that have different copies on the engine's workers."""
    group_shares: dict[str, list[tuple[int, int] | None]] = {}
    for worker in workers:
        for group, share in worker.items():
            group_shares.setdefault(group, []).append(share)
    fingerprint: Fingerprint = {}
    unequal = []
    for group, shares in group_shares.items():
        pairs = [share for share in shares if share is not None]
        if len(pairs) < len(shares):
            fingerprint[group] = None
            continue
        copies = {replicated_sum for _, replicated_sum in pairs}
        fingerprint[group] = (sum(sharded_sum for sharded_sum, _ in pairs) + min(copies)) % MODULUS
        if len(copies) > 1:
            unequal.append(group)
    return fingerprint, unequal


def differing(expected: Mapping[str, int], actual: Mapping[str, int | None]) -> list[str]:
    """Return the groups with different bits in the engine, in order. A separate tied head must equal the embedding."""
    if "lm_head" in actual and "lm_head" not in expected:
        expected = {**expected, "lm_head": expected.get("embed_tokens", 0)}
    groups = (expected.keys() | actual.keys()) - set(untold(actual))
    return in_order(group for group in groups if expected.get(group) != actual.get(group))


def untold(actual: Mapping[str, int | None]) -> list[str]:
    """Return the groups without a fingerprint from the engine, in order."""
    return in_order(group for group, value in actual.items() if value is None)


def in_order(groups: Iterable[str]) -> list[str]:
    return sorted(groups, key=lambda group: [int(part) if part.isdecimal() else part for part in group.split()])


def module_shares(name: str, module: Any, counted_ids: set[int]) -> WorkerSums:
    """Return a worker's sums for the parameters in a vLLM or SGLang module, without submodules.

    counted_ids: ids of already counted parameters, such as a tied head. This function adds the ids that it counts.
    """
    shares: WorkerSums = {}
    classes = {cls.__name__ for cls in type(module).__mro__}
    # A convolution in gated delta net has three parts that engines shard separately. The module lacks their sizes.
    changed = _changed_in_place(module) or (part_of(f"{name}.weight") == "conv1d" and place(module)[1] > 1)
    for parameter_name, parameter in module.named_parameters(recurse=False):
        if id(parameter) in counted_ids or not parameter.numel() or not _is_sent(classes, parameter_name, parameter):
            continue
        counted_ids.add(id(parameter))
        for group, value, whole in _parameter_sums(f"{name}.{parameter_name}", module, classes, parameter):
            pair = (0, value) if whole else (value, 0)
            add_shares(shares, {group: None if changed else pair})
    return shares


def adapter_shares(name: str, layer: Any, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> WorkerSums:
    """Return a worker's sums for the adapter on `layer`, a vLLM or SGLang module.

    a: A [..., r, in] for each projection that the module fuses, in order and without padding.
    b: B [..., out, r] likewise.
    """
    shares: WorkerSums = {}
    classes = {cls.__name__ for cls in type(layer).__mro__}
    for sharded, parts in {"RowParallelLinear": a, "ColumnParallelLinear": b}.items():
        whole = sharded not in classes or place(layer)[1] == 1
        for index, part, shard in _fused(f"{name}.weight", layer, whole):
            rows = parts[index].reshape(-1, parts[index].shape[-1])
            column, row = (shard * rows.shape[1], 0) if parts is a else (0, shard * len(rows))
            (value,) = _placed(part, _row_sums(rows, column), row)
            if value:  # 0 if the adapter does not change the layer
                add_shares(shares, {group_of(f"{name}.weight"): (0, value) if whole else (value, 0)})
    return shares


def add_shares(shares: WorkerSums, addend: WorkerSums) -> None:
    for group, share in addend.items():
        total = shares.get(group, (0, 0))
        if share is None or total is None:
            shares[group] = None
        else:
            shares[group] = ((total[0] + share[0]) % MODULUS, (total[1] + share[1]) % MODULUS)


def _changed_in_place(module: Any) -> bool:
    """Return whether the engine replaced loaded values, or moved them to unknown positions.

    SGLang rescales FP8 weights for DeepGEMM on Blackwell by powers of two, packs weights for AMX, and reorders experts
    for a kernel. vLLM cuts FP8 experts into blocks that several workers share.
    """
    method, config = (getattr(module, attribute, None) for attribute in ("quant_method", "moe_config"))
    marks = (
        (module, "use_intel_amx_backend"),
        (method, "load_up_proj_weight_first"),
        (config, "tp_shard_with_padding"),
    )
    moved = any(getattr(p, "format_ue8m0", False) or p.ndim > 3 for p in module.parameters(recurse=False))
    return moved or any(getattr(owner, mark, False) is True for owner, mark in marks)


def _is_sent(classes: set[str], name: str, parameter: torch.Tensor) -> bool:
    """Return whether the trainer sends the parameter and it is not a reference to another module's parameter.

    SGLang sets and marks the cache scales itself. Expert vectors are the router's `e_score_correction_bias`, counted
    with the router.
    """
    if classes & _DERIVED or name in _DERIVED_NAMES or getattr(parameter, "_skip_weight_check", False):
        return False
    return not classes & _EXPERTS or parameter.ndim > 1


def _parameter_sums(
    name: str, module: Any, classes: set[str], parameter: torch.Tensor
) -> Iterator[tuple[str, int, bool]]:
    """Yield (group, sum, whether every worker has the whole projection) for each projection in a parameter.

    Example: 4 query heads and 2 KV heads with 8 rows each, 2 workers. Worker 1 has 32 rows of `layers.3...qkv_proj`:

        local rows  projection   rows in the whole tensor     yields
        0 to 15     q_proj       16 to 31  (shard 1 x 16)     ("layer 3", sum, False)
        16 to 23    k_proj       8 to 15   (shard 1 x 8)      ("layer 3", sum, False)
        24 to 31    v_proj       8 to 15   (shard 1 x 8)      ("layer 3", sum, False)

    With 1 KV head, both workers have the KV rows. Only worker 0 counts them; worker 1 yields only q_proj. A
    row-parallel `o_proj` with 32 columns is split by columns: worker 1 starts at column 16. Every worker has the whole
    norm: True.
    """
    if classes & _EXPERTS:
        layer, first = group_of(name), getattr(module, "moe_ep_rank", 0) == 0
        for expert, value in zip(_experts(module, len(parameter)), _expert_sums(name, module, parameter), strict=True):
            if expert is not None:
                yield f"{layer} expert {expert}", value, False
            elif first:  # workers with other experts also have the shared experts; only this worker counts them
                yield layer, value, False
        return
    rank, size = place(module)
    by_row = "RowParallelLinear" in classes
    whole = not classes & _SHARDED or size == 1 or (by_row and parameter.ndim < 2)
    sums = _row_sums(parameter, rank * parameter.shape[-1] if by_row and not whole else 0)
    sizes = module.output_partition_sizes if part_of(name) in _FUSED else [1]
    bounds = [len(sums) * end // sum(sizes) for end in accumulate(sizes, initial=0)]  # FP8 scales have fewer rows
    preceding_rows: dict[str, int] = {}  # rows in the whole tensor that precede this part
    for index, part, shard in _fused(name, module, whole or by_row):
        rows = bounds[index + 1] - bounds[index]
        row = preceding_rows.get(part, 0) + shard * rows
        preceding_rows[part] = preceding_rows.get(part, 0) + rows * (1 if whole else size)
        if hasattr(module, "shard_indices"):  # an embedding
            row = module.shard_indices.padded_org_vocab_start_index
        yield group_of(name), _placed(part, sums[bounds[index] : bounds[index + 1]], row)[0], whole


def _fused(name: str, module: Any, whole: bool) -> Iterator[tuple[int, str, int]]:
    """Yield (index, name, this worker's shard number) for each projection that a module fuses."""
    rank, leaf = place(module)[0], part_of(name)
    for index, part in enumerate(_FUSED.get(leaf, (leaf,))):
        copies = getattr(module, "num_kv_head_replicas", 1) if index > 0 else 1
        if whole or rank % copies == 0:  # several workers have a head's keys and values; only the first counts them
            yield index, part, 0 if whole else rank // copies


def _expert_sums(name: str, module: Any, parameter: torch.Tensor) -> list[int]:
    """Return each expert's sum, without vLLM's kernel padding, because a load does not write it."""
    config = getattr(module, "moe_config", None)
    rank = getattr(config, "tp_rank", getattr(module, "moe_tp_rank", 0))
    interleaved = type(module).__name__ == "GptOssRoutedExperts"  # vLLM: gate 0, up 0, gate 1, up 1; never padded
    padded = name.endswith("_weight") and not interleaved
    unpadded_size = getattr(config, "intermediate_size_per_partition_unpadded", None) if padded else None
    flat = parameter.detach().reshape(-1, parameter.shape[-1] if parameter.ndim > 2 else 1)
    if ".w2_" in name:
        flat = flat[:, :unpadded_size]
        return _placed("down_proj", _row_sums(flat, rank * flat.shape[1]).view(len(parameter), -1))
    gated = ("gate_up_proj",) if interleaved else ("gate_proj", "up_proj")
    names = gated if getattr(config, "is_act_and_mul", True) else ("up_proj",)
    sums = _row_sums(flat).view(len(parameter), len(names), -1)[..., :unpadded_size]
    values = [_placed(part, sums[:, index], rank * sums.shape[-1]) for index, part in enumerate(names)]
    return [sum(expert_sums) % MODULUS for expert_sums in zip(*values, strict=True)]


def place(module: Any) -> tuple[int, int]:
    """Return this worker's rank among the workers that shard the module, and how many they are.

    SGLang's linear layers name a group, or None if every worker has all weights.
    """
    module = getattr(module, "qkv_proj", module)  # attention with sinks, which are sharded like the heads
    if hasattr(module, "tp_group"):
        group = module.tp_group
        return (0, 1) if group is None else (group.rank_in_group, group.world_size)
    return getattr(module, "tp_rank", 0), getattr(module, "tp_size", 1)


def _experts(module: Any, count: int) -> list[int | None]:
    """Return each expert's number in the model, or None for a shared expert that runs as a routed expert."""
    numbers: list[int | None] = list(range(count))
    placed = getattr(module, "_expert_map", None)  # vLLM: [experts of the model], local index or -1
    if placed is not None:
        for number, place in enumerate(placed.tolist()):
            if 0 <= place < count:
                numbers[place] = number
    elif hasattr(module, "moe_ep_rank"):  # SGLang: equal runs of experts, then shared experts
        routed = count - getattr(module, "num_fused_shared_experts", 0)
        numbers = [module.moe_ep_rank * routed + place if place < routed else None for place in range(count)]
    return numbers
