"""The distributed optimizer's state in checkpoints: data-parallel ranks share it, in memory and in files.

The files are those of Megatron's `fully_reshardable` format: for each parameter its main value and its moments in the
parameter's shape, which load in any layout. Megatron's own code gathers all of them on every rank. In megatron-core
0.16.1, the newest for Python 3.11, it also reads them from wrong offsets where a buffer has several buckets with
padding between them; https://github.com/NVIDIA/Megatron-LM/pull/5077 mends that, and a test of `tests/actor` fails when
the installed release has it. Here each parameter has one rank that saves and loads it whole, its saver, and one
exchange per bucket brings the pieces from the ranks that hold them to the saver or back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

Piece = tuple[nn.Parameter, slice]  # elements of the flat parameter
States = dict[str, Tensor]  # _STATES of one parameter, in its shape, fp32 on the host


def sharded_state_dict(part: DistributedOptimizer, weights: dict[str, Any], *, loading: bool) -> dict[str, Any]:
    """`part.sharded_state_dict` of what this rank saves. weights: the sharded state dict of the model.

    `loading`: of empty tensors, for `load_states`. Else collective over the optimizer's data-parallel group.
    """
    state = part.state_dict()
    if loading:
        part.load_state_dict(part.state_dict())  # Megatron's way to create what is to be loaded into
    saved = _saved_here(part)
    if not loading:
        _exchange(part, saved, to_savers=True)
    shards, _ = extract_sharded_tensors_and_factories(weights)
    of_weight = {shard.data: shard for shard in nested_values(shards)}
    shards_of_state = {
        number: {name: _shard(of_weight[weight], name, tensor) for name, tensor in states.items()}
        for number, (weight, states) in saved.items()
    }
    return {**state, "param_state": shards_of_state, "param_state_sharding_type": "fully_reshardable"}


def load_states(part: DistributedOptimizer, loaded: dict[int, States]) -> None:
    """Give each rank its pieces of what the savers have loaded: the `param_state` of `sharded_state_dict`.

    Collective over the optimizer's data-parallel group.
    """
    weights = {number: weight for number, (weight, _) in _saved_here(part).items()}
    _exchange(part, {number: (weights[number], states) for number, states in loaded.items()}, to_savers=False)


def _saved_here(part: DistributedOptimizer) -> dict[int, tuple[nn.Parameter, States]]:
    """The parameters that this rank saves, by their number among all, with room for their state."""
    rank = part.data_parallel_group.rank()
    return {
        number: (weight, {name: torch.empty(weight.shape, dtype=torch.float32) for name in _STATES})
        for number, (weight, saver) in enumerate(_savers(part).items())
        if saver == rank
    }


def _savers(part: DistributedOptimizer) -> dict[nn.Parameter, int]:
    """Each parameter, in an order that all ranks share, and its saver: the rank that has least so far."""
    sizes = [0] * part.data_parallel_group.size()
    savers = {}
    for weight in (weight for buffer in part.buffers for weight in buffer.param_index_map):
        savers[weight] = sizes.index(min(sizes))
        sizes[savers[weight]] += weight.numel()
    return savers


@dataclass(frozen=True)
class _Bucket:
    """A stretch of a buffer of which each rank holds a part of `local` elements."""

    local: int
    device: torch.device
    spans: dict[nn.Parameter, tuple[int, int]]  # where its parameters begin and end in it
    savers: dict[nn.Parameter, int]

    def pieces(self, holder: int, saver: int) -> list[Piece]:
        """What `holder` holds of the parameters of `saver`."""
        first, end = holder * self.local, (holder + 1) * self.local
        return [
            (weight, slice(max(begin, first) - begin, min(finish, end) - begin))
            for weight, (begin, finish) in self.spans.items()
            if self.savers[weight] == saver and begin < end and finish > first
        ]


def _buckets(part: DistributedOptimizer) -> Iterator[_Bucket]:
    savers = _savers(part)
    for buffer in part.buffers:
        for index, bucket in enumerate(buffer.buckets):
            spans = {
                weight: (begin - bucket.offset, finish - bucket.offset)
                for weight, (begin, finish, number) in buffer.param_index_map.items()
                if number == index
            }
            local = bucket.grad_data.numel() // part.data_parallel_group.size()
            yield _Bucket(local, bucket.grad_data.device, spans, savers)


@torch.no_grad()
def _exchange(part: DistributedOptimizer, saved: dict[int, tuple[nn.Parameter, States]], *, to_savers: bool) -> None:
    """Fill `saved` from the ranks' pieces, or the pieces from `saved`: one all-to-all per bucket."""
    whole = dict(saved.values())

    def read_held(weight: nn.Parameter, _where: slice) -> Tensor:
        states = part._get_main_param_and_optimizer_states(weight)
        return torch.stack([states[name].detach().float().flatten() for name in _STATES], dim=1)

    def write_held(weight: nn.Parameter, _where: slice, rows: Tensor) -> None:
        part._set_main_param_and_optimizer_states(weight, dict(zip(_STATES, rows.unbind(1), strict=True)))

    def read_saved(weight: nn.Parameter, where: slice) -> Tensor:
        return torch.stack([whole[weight][name].view(-1)[where] for name in _STATES], dim=1)

    def write_saved(weight: nn.Parameter, where: slice, rows: Tensor) -> None:
        for name, column in zip(_STATES, rows.unbind(1), strict=True):
            whole[weight][name].view(-1)[where].copy_(column)

    group = part.data_parallel_group
    me, ranks = group.rank(), range(group.size())
    for bucket in _buckets(part):
        held = [bucket.pieces(me, saver) for saver in ranks]
        wanted = [bucket.pieces(holder, me) for holder in ranks]
        if to_savers:
            _all_to_all(held, read_held, wanted, write_saved, bucket.device, group)
        else:
            _all_to_all(wanted, read_saved, held, write_held, bucket.device, group)


def _all_to_all(
    outgoing: list[list[Piece]],
    read: Callable[[nn.Parameter, slice], Tensor],
    incoming: list[list[Piece]],
    write: Callable[[nn.Parameter, slice, Tensor], None],
    device: torch.device,
    group: dist.ProcessGroup,
) -> None:
    """Rows [n, states] of each piece from `read` on one rank to `write` on another; a list of pieces for each rank."""
    rows_out, rows_in = ([sum(w.stop - w.start for _, w in pieces) for pieces in side] for side in (outgoing, incoming))
    empty = torch.empty(0, len(_STATES), device=device)
    given = torch.cat([empty, *(read(*piece).to(device) for pieces in outgoing for piece in pieces)])
    received = empty.new_empty(sum(rows_in), len(_STATES))
    dist.all_to_all_single(received, given, rows_in, rows_out, group=group)
    arrived = [piece for pieces in incoming for piece in pieces]
    for (weight, where), rows in zip(arrived, received.split([w.stop - w.start for _, w in arrived]), strict=True):
        write(weight, where, rows)


def _shard(weight_shard: Any, name: str, tensor: Tensor) -> Any:
    """`weight_shard` with `tensor` for the weight; of the data-parallel ranks this one counts."""
    changes = {
        "key": f"optimizer.state.{name}.{weight_shard.key}",
        "data": tensor,
        "replica_id": (*weight_shard.replica_id[:-1], 0),
    }
    if not isinstance(weight_shard, ShardedTensorFactory):
        changes["dtype"] = tensor.dtype
    return replace(weight_shard, **changes)
