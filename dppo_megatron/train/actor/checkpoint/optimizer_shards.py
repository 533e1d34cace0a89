"""Saves the distributed optimizer's state, split over data-parallel ranks in memory and in files.

The files have Megatron's `fully_reshardable` format: they store each parameter's main value and moments in the
parameter's shape, and load in any layout. Megatron's code gathers all values on every rank. In megatron-core 0.16.1,
the newest for Python 3.11, it also reads wrong offsets if a buffer has several buckets with padding between them.
https://github.com/NVIDIA/Megatron-LM/pull/5077 fixes that, and a test in `tests/train/actor` fails when the installed
release has the fix. Here a single rank, the saver, saves and loads each whole parameter. An exchange per bucket, in
parts, moves the pieces between the saver and the ranks that use them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

_STATES = ("param", "exp_avg", "exp_avg_sq")

EXCHANGE_BYTES = 96 << 20  # device memory for the sent bytes, and as much for the received bytes
STATE_BYTES = len(_STATES) * 4  # state bytes per parameter element

States = dict[str, Tensor]  # a parameter's _STATES in the parameter's shape, fp32 on the host


def sharded_state_dict(part: DistributedOptimizer, weights: dict[str, Any], *, loading: bool) -> dict[str, Any]:
    """Return `part.sharded_state_dict` for the parameters that this rank saves.

    weights: the model's sharded state dict.
    With `loading` the tensors are empty, for `load_states`. Otherwise all ranks of the optimizer's data-parallel group
    must call this function. The saved state goes to the host and takes at most twice `EXCHANGE_BYTES` on the device.
    """
    state = part.state_dict()
    saved = {number: (weight, _empty_states(weight)) for number, weight in _saved_here(part).items()}
    if not loading:
        _exchange(part, saved, to_savers=True)
    shards, _ = extract_sharded_tensors_and_factories(weights)
    weight_shards = {shard.data: shard for shard in nested_values(shards)}
    shards_of_state = {
        number: {name: _shard(weight_shards[weight], name, tensor) for name, tensor in states.items()}
        for number, (weight, states) in saved.items()
    }
    return {**state, "param_state": shards_of_state, "param_state_sharding_type": "fully_reshardable"}


def load_states(part: DistributedOptimizer, loaded: dict[int, States]) -> None:
    """Send loaded states from the savers to the ranks that use them.

    loaded: states that this rank loaded as a saver, the `param_state` of `sharded_state_dict`.
    Collective over the optimizer's data-parallel group.
    """
    weights = _saved_here(part)
    _exchange(part, {number: (weights[number], states) for number, states in loaded.items()}, to_savers=False)


def _saved_here(part: DistributedOptimizer) -> dict[int, nn.Parameter]:
    """Return the parameters that this rank saves, by index among all parameters."""
    rank = part.data_parallel_group.rank()
    return {number: weight for number, (weight, saver) in enumerate(_savers(part).items()) if saver == rank}


def _empty_states(weight: nn.Parameter) -> States:
    return {name: torch.empty(weight.shape, dtype=torch.float32) for name in _STATES}


def _savers(part: DistributedOptimizer) -> dict[nn.Parameter, int]:
    """Map each parameter to the rank that saves it, in the same order on all ranks.

    The largest unassigned parameter goes to the rank with the fewest elements, so that all ranks save similar numbers.
    """
    weights = [weight for buffer in part.buffers for weight in buffer.param_index_map]
    sizes = [0] * part.data_parallel_group.size()
    savers = dict.fromkeys(weights, 0)
    for weight in sorted(weights, key=torch.numel, reverse=True):
        savers[weight] = sizes.index(min(sizes))
        sizes[savers[weight]] += weight.numel()
    return savers


@dataclass(frozen=True)
class _Bucket:
    """Describes a bucket, a part of a buffer that is divided over the ranks: `local` elements on each rank."""

    local: int
    device: torch.device
    weights: list[nn.Parameter]  # sorted by offset
    begins: list[int]  # first element of each parameter

    def pieces(self, holder: int, first: int, end: int) -> Iterator[tuple[nn.Parameter, slice, int]]:
        """Yield the parameters in elements `first` to `end` of the bucket part on rank `holder`.

        Each item contains the parameter, the slice of its elements, and the index of its first element on `holder`.
        """
        start = holder * self.local
        first, end = start + first, start + end
        for index in range(max(0, bisect_right(self.begins, first) - 1), len(self.weights)):
            weight, begin = self.weights[index], self.begins[index]
            if begin >= end:
                return
            finish = begin + weight.numel()
            if finish > first:
                weight_slice = slice(max(begin, first) - begin, min(finish, end) - begin)
                yield weight, weight_slice, max(begin, start) - begin


def _buckets(part: DistributedOptimizer) -> Iterator[_Bucket]:
    for buffer in part.buffers:
        for index, bucket in enumerate(buffer.buckets):
            spans = [
                (begin - bucket.offset, weight)
                for weight, (begin, _, number) in buffer.param_index_map.items()
                if number == index
            ]
            spans.sort(key=lambda span: span[0])
            local = bucket.grad_data.numel() // part.data_parallel_group.size()
            begins, weights = [begin for begin, _ in spans], [weight for _, weight in spans]
            yield _Bucket(local, bucket.grad_data.device, weights, begins)


@torch.no_grad()
def _exchange(part: DistributedOptimizer, saved: dict[int, tuple[nn.Parameter, States]], *, to_savers: bool) -> None:
    """Fill `saved` from the ranks' pieces, or the pieces from `saved`, by all-to-alls of at most `EXCHANGE_BYTES`."""
    whole, savers = dict(saved.values()), _savers(part)
    group = part.data_parallel_group
    me, size = group.rank(), group.size()
    # All ranks send this much at once, because a single rank may save all these bytes.
    step = max(1, EXCHANGE_BYTES // (size * STATE_BYTES))
    buckets = list(_buckets(part))
    at_once = min(step, max(bucket.local for bucket in buckets))
    max_whole_numel = min(size * at_once, sum(weight.numel() for weight in whole))
    shard_buffer, whole_buffer = (
        torch.empty(count * len(_STATES), device=buckets[0].device) for count in (at_once, max_whole_numel)
    )
    for bucket in buckets:
        for first in range(0, bucket.local, step):
            end = min(first + step, bucket.local)
            shard_pieces: list[list[Tensor]] = [[] for _ in range(size)]
            for weight, weight_slice, begin in bucket.pieces(me, first, end):
                states = part._get_main_param_and_optimizer_states(weight)
                shard_slice = slice(weight_slice.start - begin, weight_slice.stop - begin)
                shard_pieces[savers[weight]] += [states[name].detach().view(-1)[shard_slice] for name in _STATES]
            whole_pieces = [
                [
                    whole[weight][name].view(-1)[weight_slice]
                    for weight, weight_slice, _ in bucket.pieces(holder, first, end)
                    if savers[weight] == me
                    for name in _STATES
                ]
                for holder in range(size)
            ]
            if to_savers:
                _all_to_all(shard_pieces, shard_buffer, whole_pieces, whole_buffer, group)
            else:
                _all_to_all(whole_pieces, whole_buffer, shard_pieces, shard_buffer, group)


def _all_to_all(
    outgoing: list[list[Tensor]],
    out_buffer: Tensor,
    incoming: list[list[Tensor]],
    in_buffer: Tensor,
    group: dist.ProcessGroup,
) -> None:
    """Exchange flat tensors, on any device, through buffers on the group's device."""
    sizes_out, sizes_in = ([sum(t.numel() for t in tensors) for tensors in side] for side in (outgoing, incoming))
    out_flat, in_flat = out_buffer[: sum(sizes_out)], in_buffer[: sum(sizes_in)]
    for place, tensor in _places(out_flat, outgoing):
        place.copy_(tensor)
    dist.all_to_all_single(in_flat, out_flat, sizes_in, sizes_out, group=group)
    for place, tensor in _places(in_flat, incoming):
        tensor.copy_(place)


def _places(flat: Tensor, sides: list[list[Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    tensors = [tensor for side in sides for tensor in side]
    return zip(flat.split([tensor.numel() for tensor in tensors]), tensors, strict=True)


def _shard(weight_shard: Any, name: str, tensor: Tensor) -> Any:
    """Return `weight_shard` with `tensor` in place of the weight, saved by this data-parallel rank."""
    changes: dict[str, Any] = {
        "key": f"optimizer.state.{name}.{weight_shard.key}",
        "data": tensor,
        "replica_id": (*weight_shard.replica_id[:-1], 0),
    }
    if not isinstance(weight_shard, ShardedTensorFactory):
        changes["dtype"] = tensor.dtype
    return replace(weight_shard, **changes)
