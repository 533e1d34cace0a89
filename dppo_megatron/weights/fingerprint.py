"""Fingerprints of weights: one number for each layer, expert and tensor outside the layers, as Hugging Face names them.

The sum over all elements of a mix of each one's bits, modulo 2**64. So it does not depend on their order, and elements
that are zero count nothing: it is the same for fused, sharded, permuted and padded weights, and another one when a
single bit is. Floats of 16 and 8 bits count as the fp32 of the same value.

In need of torch alone, and of no other module: an SGLang server loads this file by its path.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

MODULUS = 1 << 64
CHUNK = {"cpu": 1 << 17, "cuda": 1 << 24}  # elements mixed at a time: what a CPU's cache holds

_LAYER = re.compile(r"\blayers\.(\d+)\.")
_EXPERT = re.compile(r"\bexperts\.(\d+)\.")
_MIX = (0x9E3779B97F4A7C15 - MODULUS, 0xBF58476D1CE4E5B9 - MODULUS)  # odd, as signed numbers: of splitmix64
_MIX_UPPER = (_MIX[0] << 16) % MODULUS  # below 2**63; of bits that are the upper half of an fp32

_EXPERTS = {"RoutedExperts", "FusedMoE"}
_SHARDED = {"ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"}
_DERIVED = {"MLAAttention"}  # vLLM's: all its parameters are made of those of kv_b_proj, W_UV and W_UK_T
_DERIVED_NAMES = {"w_kc", "w_vc"}  # SGLang's, of the same; parameters where a CPU with AMX packs them

Fingerprint = dict[str, int | None]
"""None: an engine cannot tell, for it changed what it loaded and keeps nothing else."""
Shares = dict[str, tuple[int, int] | None]
"""Of one worker, by group: what adds up over the workers, and what each of them holds whole. None as above."""


def group_of(name: str) -> str:
    """The group of a tensor: "layer 3", "layer 3 expert 5", or the name of a module outside the layers."""
    layer, expert = _LAYER.search(name), _EXPERT.search(name)
    if layer is None:
        return name.rpartition(".")[0].rpartition(".")[2]
    return f"layer {layer[1]} expert {expert[1]}" if expert else f"layer {layer[1]}"


@torch.no_grad()
def bit_sums(rows: torch.Tensor) -> list[int]:
    """Of each row of `rows` [n, ...], modulo 2**64."""
    rows = rows.detach().reshape(len(rows), -1) if rows.numel() else rows.detach().reshape(len(rows), 0)
    chunk = CHUNK.get(rows.device.type, CHUNK["cuda"])
    sums = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    height, width = max(1, chunk // max(1, rows.shape[1])), min(chunk, rows.shape[1])
    room = torch.empty(2, min(height, len(rows)) * width, dtype=torch.int64, device=rows.device)
    for top in range(0, len(rows), height):
        for left in range(0, rows.shape[1], chunk):
            part = rows[top : top + height, left : left + chunk]
            bits, factor = _bits(part)
            mixed, upper = (buffer[: part.numel()].view(part.shape) for buffer in room)
            mixed.copy_(bits).mul_(factor)
            torch.bitwise_right_shift(mixed, 29, out=upper)
            sums[top : top + height] += mixed.bitwise_xor_(upper).sum(1)
    return [value * _MIX[1] % MODULUS for value in sums.tolist()]  # the same for all elements, so once for their sum


def _bits(part: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Integers, and what to multiply them by first. A bf16 is the upper half of an fp32, so its own bits will do."""
    if part.dtype == torch.bfloat16:
        return part.view(torch.int16), _MIX_UPPER
    return part.float().view(torch.int32) if part.is_floating_point() else part, _MIX[0]


def bit_sum(tensor: torch.Tensor) -> int:
    return bit_sums(tensor.reshape(1, -1))[0] if tensor.numel() else 0


def add(fingerprint: dict[str, int], name: str, tensor: torch.Tensor) -> None:
    """Counts a tensor in, under its name in Hugging Face."""
    group = group_of(name)
    fingerprint[group] = (fingerprint.get(group, 0) + bit_sum(tensor)) % MODULUS


def merged(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Of weights that lie in several places, each once."""
    whole: dict[str, int] = {}
    for part in parts:
        for group, value in part.items():
            whole[group] = (whole.get(group, 0) + value) % MODULUS
    return whole


def of_workers(workers: Iterable[Shares]) -> tuple[Fingerprint, list[str]]:
    """Of an engine, and the groups of which its workers hold unequal copies."""
    by_group: dict[str, list[tuple[int, int] | None]] = {}
    for worker in workers:
        for group, share in worker.items():
            by_group.setdefault(group, []).append(share)
    whole: Fingerprint = {}
    unequal = []
    for group, shares in by_group.items():
        told = [share for share in shares if share is not None]
        if len(told) < len(shares):
            whole[group] = None
            continue
        copies = {copy for _, copy in told}
        whole[group] = (sum(own for own, _ in told) + min(copies)) % MODULUS
        if len(copies) > 1:
            unequal.append(group)
    return whole, unequal


def differing(expected: Mapping[str, int], held: Mapping[str, int | None]) -> list[str]:
    """Groups of which an engine holds other bits, in order. A head of its own that is tied holds the embedding's."""
    if "lm_head" in held and "lm_head" not in expected:
        expected = {**expected, "lm_head": expected.get("embed_tokens", 0)}
    told = (expected.keys() | held.keys()) - set(untold(held))
    return in_order(group for group in told if expected.get(group) != held.get(group))


def untold(held: Mapping[str, int | None]) -> list[str]:
    """Groups of which an engine cannot tell what it loaded, in order."""
    return in_order(group for group, value in held.items() if value is None)


def in_order(groups: Iterable[str]) -> list[str]:
    return sorted(groups, key=lambda group: [int(part) if part.isdecimal() else part for part in group.split()])


def module_shares(name: str, module: Any, seen: set[int]) -> Shares:
    """What a worker holds in the parameters of one module of vLLM's or SGLang's, submodules apart.

    seen: parameters that count already, as those of a tied head; changed here.
    """
    shares: Shares = {}
    classes = {cls.__name__ for cls in type(module).__mro__}
    changed = _changed_in_place(module)
    for parameter_name, parameter in module.named_parameters(recurse=False):
        if id(parameter) in seen or not parameter.numel() or not _is_sent(classes, parameter_name, parameter):
            continue
        seen.add(id(parameter))
        for group, value, whole in _parts(f"{name}.{parameter_name}", module, classes, parameter):
            part = (0, value) if whole else (value, 0)
            add_shares(shares, {group: None if changed else part})
    return shares


def adapter_shares(name: str, layer: Any, a: Iterable[torch.Tensor], b: Iterable[torch.Tensor]) -> Shares:
    """What a worker multiplies with for the adapter of one module of vLLM's or SGLang's, `layer`: A's and B's of the
    layers that it fuses, in their order, without room that is not used."""
    shares: Shares = {}
    classes = {cls.__name__ for cls in type(layer).__mro__}
    rank, size = place(layer)
    replicas = getattr(layer, "num_kv_head_replicas", 1)
    for parts, sharded in ((a, "RowParallelLinear"), (b, "ColumnParallelLinear")):
        whole = sharded not in classes or size == 1
        for index, part in enumerate(parts):
            if not whole and index > 0 and replicas > 1 and rank % replicas:
                continue  # keys and values of one head are on several workers, of which one counts
            if value := bit_sum(part):  # 0 where the adapter has nothing for the layer
                add_shares(shares, {group_of(f"{name}.weight"): (0, value) if whole else (value, 0)})
    return shares


def add_shares(shares: Shares, more: Shares) -> None:
    for group, share in more.items():
        before = shares.get(group, (0, 0))
        if share is None or before is None:
            shares[group] = None
        else:
            shares[group] = ((before[0] + share[0]) % MODULUS, (before[1] + share[1]) % MODULUS)


def _changed_in_place(module: Any) -> bool:
    """Whether an engine replaced what was loaded by something else: SGLang scales FP8 weights anew for DeepGEMM on
    Blackwell, by powers of two; vLLM cuts FP8 experts in blocks that several workers hold a part of."""
    if any(getattr(parameter, "format_ue8m0", False) for parameter in module.parameters(recurse=False)):
        return True
    return bool(getattr(getattr(module, "moe_config", None), "tp_shard_with_padding", False))


def _is_sent(classes: set[str], name: str, parameter: torch.Tensor) -> bool:
    """Whether it is one of the trainer's weights, and not another's that this module refers to.

    SGLang marks the scales of its cache, which it sets itself. Vectors of experts are the router's
    `e_score_correction_bias`, which counts there.
    """
    if classes & _DERIVED or name in _DERIVED_NAMES or getattr(parameter, "_skip_weight_check", False):
        return False
    return not classes & _EXPERTS or parameter.ndim > 1


def _parts(name: str, module: Any, classes: set[str], parameter: torch.Tensor) -> Iterator[tuple[str, int, bool]]:
    """(group, sum, whether every worker holds it whole) of one parameter."""
    if classes & _EXPERTS:
        layer, first = group_of(name), getattr(module, "moe_ep_rank", 0) == 0
        padding = [bit_sums(part) for part in _padding(module, name, parameter)]
        for expert, value, *more in zip(_experts(module, len(parameter)), bit_sums(parameter), *padding, strict=True):
            value = (value - sum(more)) % MODULUS
            if expert is not None:
                yield f"{layer} expert {expert}", value, False
            elif first:  # shared ones are on every worker that holds other experts, of which one counts
                yield layer, value, False
        return
    rank, size = place(module)
    whole = not classes & _SHARDED or size == 1 or ("RowParallelLinear" in classes and parameter.ndim < 2)
    replicas = getattr(module, "num_kv_head_replicas", 1)
    if replicas > 1:  # keys and values of one head are on several workers, of which one counts
        heads = module.num_heads * module.head_size
        others = module.num_kv_heads * (module.head_size + module.v_head_size)
        queries = len(parameter) * heads // (heads + others)  # FP8 scales have fewer rows than the weight
        yield group_of(name), bit_sum(parameter[:queries]), False
        if rank % replicas == 0:
            yield group_of(name), bit_sum(parameter[queries:]), False
        return
    yield group_of(name), bit_sum(parameter), whole


def _padding(module: Any, name: str, parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """Parts of vLLM's experts that are there for a kernel's sake: a load writes nothing to them."""
    config = getattr(module, "moe_config", None)
    size = getattr(config, "intermediate_size_per_partition_unpadded", None)
    if size is None or parameter.ndim != 3:
        return
    if name.endswith(".w2_weight"):
        yield parameter[:, :, size:]
    elif name.endswith(".w13_weight"):
        for projection in parameter.chunk(2 if config.is_act_and_mul else 1, dim=1):
            yield projection[:, size:]


def place(module: Any) -> tuple[int, int]:
    """This worker's number among those that share the module's weights, and how many they are.

    SGLang's linear layers name a group, or None where every worker has all.
    """
    if hasattr(module, "tp_group"):
        group = module.tp_group
        return (0, 1) if group is None else (group.rank_in_group, group.world_size)
    return getattr(module, "tp_rank", 0), getattr(module, "tp_size", 1)


def _experts(module: Any, count: int) -> list[int | None]:
    """Number in the model of each expert that the module holds; None for a shared one that runs as one of them."""
    numbers: list[int | None] = list(range(count))
    placed = getattr(module, "_expert_map", None)  # vLLM: [experts of the model], place here or -1
    if placed is not None:
        for number, place in enumerate(placed.tolist()):
            if 0 <= place < count:
                numbers[place] = number
    elif hasattr(module, "moe_ep_rank"):  # SGLang: equal runs, then shared ones
        routed = count - getattr(module, "num_fused_shared_experts", 0)
        numbers = [module.moe_ep_rank * routed + place if place < routed else None for place in range(count)]
    return numbers
