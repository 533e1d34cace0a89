"""Prepares a micro-batch for the model: packed sequences, their attention plan, and the rows that carry loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from dppo_megatron.common.row_math import rope_tables
from dppo_megatron.config.schema import Config
from dppo_megatron.hf import HFModelConfig, inverse_frequencies
from dppo_megatron.objectives import sequence_ids_from_cu_seqlens
from dppo_megatron.train.actor.layout import Layout
from dppo_megatron.train.actor.model_config import dtype, use_transformer_engine
from dppo_megatron.train.actor.precision import row_multiple
from dppo_megatron.types import COLUMNS, TokenBatch, column_named

from .chunks import ChunkPlan, plan_chunks
from .context import rows_of_rank
from .flash import FlashPlan, can_use_flash, plan_flash
from .prefixes import SharedRows, shared_rows
from .routing import ReplayedExperts
from .segments import SegmentPlan, plan_segments

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass
class PackedSequences(PackedSeqParams):
    """Adds the inputs of our layers to Megatron's description of packed sequences.

    rows: [n] rows of this rank's hidden states that go to the head; n is at least 1.
    plan: for `PackedAttention`; None if TransformerEngine computes attention.
    rope: for `PackedAttention`; None if Megatron rotates.
    chunks: for `GatedDeltaNet`; None for models without such layers.
    replay: for `RoutingReplay`; None if every router chooses the experts itself.
    """

    rows: Int[Tensor, " n"] | None = None
    plan: SegmentPlan | FlashPlan | None = None
    rope: tuple[Float[Tensor, "T 1 r"], Float[Tensor, "T 1 r"]] | None = None
    chunks: ChunkPlan | None = None
    replay: ReplayedExperts | None = None


@dataclass(frozen=True)
class MicroBatch:
    """Contains this rank's part of a `TokenBatch` on the device: all rows for the model, loss rows for the objective.

    A prefix that sequences share is stored once (`prefixes`), so T may be less than the number of tokens in the batch.
    Without context parallelism the part is the whole batch. `loss` contains the per-token fields of the n rows in
    `packed.rows`, including token_ids and position_ids, and the cu_seqlens of the whole batch.
    """

    token_ids: Int[Tensor, "1 T"]
    position_ids: Int[Tensor, "1 T"]
    packed: PackedSequences  # several loss rows may read the same row
    loss: TokenBatch
    loss_rows: Int[Tensor, " n"]  # row of each loss row in the batch as given
    context_rows: tuple[Int[Tensor, " m"], ...]  # loss rows of every context-parallel rank; a rank may have none
    sequence_ids: Int[Tensor, " n_all"]  # sequence number of every rank's loss rows, without gaps
    host_batch: TokenBatch  # the batch as given, on the CPU
    num_tokens: int  # tokens on this rank
    num_loss_tokens: int
    whole: TokenBatch | None = None  # `loss` of all context-parallel ranks, rank by rank; None unless requested


@dataclass(frozen=True)
class Packer:
    """Turns token batches into micro-batches for a model.

    frequencies: inverse rope frequencies if our attention (`PackedAttention`) rotates, else None.
    own_attention: whether to plan our attention. flash: whether this plan is for FlashAttention.
    multiple: T is padded to a multiple of this number (sequence parallelism splits T evenly, FP8 needs whole tiles).
    round_size: a pass takes a multiple of this number of micro-batches (the interleaved pipeline schedule requires it).
    equal_group: group of ranks that need equal row counts in each micro-batch, else None.
    held_layers: for routing replay, this rank's layers with experts, counted among all layers with experts; else None.
    vocab_size: token ids must be smaller than this. If it is None, ids are not checked.
    delta_net: whether gated delta net layers need a plan.
    """

    device: torch.device
    dtype: torch.dtype
    frequencies: Float[Tensor, " d/2"] | None
    own_attention: bool = True
    flash: bool = False
    multiple: int = 1
    sequence_rank: int = 0  # sequence parallelism: index of the row chunk that this rank's routers see
    sequence_size: int = 1
    context_rank: int = 0
    context_size: int = 1
    round_size: int = 1
    equal_group: dist.ProcessGroup | None = None
    held_layers: tuple[int, ...] | None = None
    vocab_size: int | None = None
    delta_net: bool = False

    @classmethod
    def build(cls, hf: HFModelConfig, config: Config, layout: Layout, held_layers: tuple[int, ...] | None) -> Packer:
        own_attention, plain = not use_transformer_engine(config), not config.engine.exact and hf.sinks is None
        gathers = hf.moe is not None and config.parallel.expert_dispatcher == "allgather"
        return cls(
            device=layout.device,
            dtype=dtype(config),
            frequencies=inverse_frequencies(hf).to(layout.device) if own_attention and hf.mla is None else None,
            own_attention=own_attention,
            flash=own_attention and plain and can_use_flash(dtype(config), hf.head_dim, layout.device),
            multiple=row_multiple(config) * (layout.tensor_size if layout.sequence_parallel else 1),
            sequence_rank=layout.tensor_rank if layout.sequence_parallel else 0,
            sequence_size=layout.tensor_size if layout.sequence_parallel else 1,
            context_rank=layout.context_rank,
            context_size=layout.context_size,
            round_size=layout.pipeline_size if layout.virtual_pipeline_size else 1,
            equal_group=layout.expert_group if gathers and layout.expert_group.size() > 1 else None,
            held_layers=held_layers,
            vocab_size=hf.vocab_size,
            delta_net=hf.delta_net is not None,
        )

    def whole_rounds(self, batches: Sequence[TokenBatch], whole_sequences: bool = False) -> list[MicroBatch]:
        """Prepare the micro-batches for a pass, then add fillers up to whole rounds.

        whole_sequences: each micro-batch also has the loss rows of other context-parallel ranks. They are copied here
        because a copy inside the loss would wait for the device.

        Raises ValueError without batches and for ids outside the vocabulary. The check runs on the host so that the
        error can name the ids; a device would only report an assertion in the embedding. All ranks of `equal_group`
        must call this method, which runs an all-reduce.
        """
        if not batches:
            raise ValueError("an update needs at least one micro-batch")
        for number, batch in enumerate(batches):
            self._check_ids(batch, number)
        missing = -len(batches) % self.round_size
        batches = [*batches, *[filler(batches[0])] * missing]
        shared = [self._shared(batch) for batch in batches]
        bounds = [
            self._bounds(batch.cu_seqlens.cpu() if rows is None else rows.bounds)
            for batch, rows in zip(batches, shared, strict=True)
        ]
        ends = torch.tensor([int(b[-1]) for b in bounds])
        if self.equal_group is not None:
            longest = ends.to(self.device)
            dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=self.equal_group)
            ends = longest.cpu()
        prepared = [self._micro_batch(*part) for part in zip(batches, shared, bounds, ends.tolist(), strict=True)]
        if whole_sequences and self.context_size > 1:
            prepared = [replace(batch, whole=to_device(_whole(batch), self.device)) for batch in prepared]
        return prepared

    def __call__(self, batch: TokenBatch) -> MicroBatch:
        """Prepare a batch on the device. Raises ValueError for a batch without tokens or with an empty sequence."""
        return self.whole_rounds([batch])[0]

    def _check_ids(self, batch: TokenBatch, number: int) -> None:
        if self.vocab_size is None:
            return
        lows = {"token_ids": 0, "target_ids": 0} | {c.name: c.fill for c in COLUMNS if c.token_ids}
        for name, low in lows.items():
            ids = batch.tensors.get(name)
            if ids is None or ids.numel() == 0:
                continue
            lowest, highest = map(int, torch.aminmax(ids))
            if lowest < low or highest >= self.vocab_size:
                raise ValueError(
                    f"{name} of micro-batch {number} must be within [{low}, {self.vocab_size}), found {lowest} to "
                    f"{highest}: the tokens do not belong to this model"
                )

    def _shared(self, batch: TokenBatch) -> SharedRows | None:
        if batch.shared_prefix is None or not batch.shared_prefix.any():
            return None
        if not self.own_attention or self.delta_net or self.context_size > 1 or self.held_layers is not None:
            raise ValueError("train.share_prefixes = true: this model cannot continue a shared prompt; set it to false")
        return shared_rows(batch.cu_seqlens.cpu(), batch.shared_prefix.cpu())

    def _bounds(self, cu_seqlens: Tensor) -> Tensor:
        """Return the sequence bounds, padded for context parallelism, then where the padding after them ends."""
        if int(cu_seqlens[-1]) == 0:
            raise ValueError("a micro-batch must have at least one token")
        unit = 2 * self.context_size if self.context_size > 1 else 1
        lengths = cu_seqlens.long().diff()
        if bool((lengths <= 0).any()):
            raise ValueError("packed sequences must not be empty")
        bounds = F.pad((-(-lengths // unit) * unit).cumsum(0), (1, 0))
        whole = self.context_size * math.lcm(self.multiple, 2 if self.context_size > 1 else 1)
        return _extend(bounds, -(-int(bounds[-1]) // whole) * whole)

    def _micro_batch(self, batch: TokenBatch, shared: SharedRows | None, bounds: Tensor, end: int) -> MicroBatch:
        """Prepare this rank's part of a batch, padded to `end` rows.

        Example: sequences [a b c] and [d e], all but c and e with loss, on 2 context-parallel ranks. Sequences are
        padded to a multiple of 4 and cut into 4 chunks. Rank 0 has the first and last chunk, rank 1 the others.

            padded row   0 1 2 3 | 4 5 6 7      bounds [0, 4, 8]
            origin       0 1 2 - | 3 4 - -      row in the batch as given; - = padding, -1
            rank         0 1 1 0 | 0 1 1 0

        Rank 0: token_ids [a 0 d 0], rows [0, 2] go to the head, loss_rows [0, 3].
        Rank 1: token_ids [b c e 0], rows [0], loss_rows [1]. Both: context_rows ([0, 3], [1]).
        """
        bounds = _extend(bounds, end)
        if shared is None:
            origin, position_ids = _padded_rows(batch.cu_seqlens.cpu().long(), bounds, batch.position_ids)
            carries = (origin >= 0) & batch.mask[origin]
            context_rows: tuple[Tensor, ...] = (origin[carries],)
        else:
            origin = F.pad(shared.origin, (0, end - len(shared.origin)), value=-1)
            position_ids = torch.where(origin >= 0, batch.position_ids[origin], 0)
            context_rows = (batch.mask.nonzero().flatten(),)
        if self.context_size > 1:
            rank_rows = [rows_of_rank(bounds, rank, self.context_size) for rank in range(self.context_size)]
            context_rows = tuple(origin[part][carries[part]] for part in rank_rows)
            local_rows = rank_rows[self.context_rank]
            origin, position_ids, carries = origin[local_rows], position_ids[local_rows], carries[local_rows]
        real = origin >= 0
        if shared is None:
            rows, num_tokens = carries.nonzero().flatten(), int(real.sum())
            loss_rows = origin[rows]
        else:
            (loss_rows,), num_tokens = context_rows, len(batch.token_ids)
            rows = shared.row[loss_rows]
        num_loss_tokens = len(rows)
        if num_loss_tokens == 0:  # the head and its collectives still run, on a row that the mask excludes
            rows, loss_rows = torch.zeros(2, 1, dtype=torch.long).unbind()
        loss = loss_fields(batch, loss_rows, num_loss_tokens > 0)
        position_ids = position_ids.to(self.device)
        return MicroBatch(
            token_ids=torch.where(real, batch.token_ids[origin], 0).to(self.device)[None],
            position_ids=position_ids[None],
            packed=self._packed(
                bounds,
                None if shared is None else F.pad(shared.prefixes, (0, 0, 0, len(bounds) - len(shared.bounds))),
                position_ids,
                rows.to(self.device),
                self._experts_to_replay(batch, origin),
            ),
            loss=to_device(loss, self.device),
            loss_rows=loss_rows.to(self.device),
            context_rows=context_rows,
            sequence_ids=_sequence_ids(batch, context_rows).to(self.device),
            host_batch=batch,
            num_tokens=num_tokens,
            num_loss_tokens=num_loss_tokens,
        )

    def _packed(
        self,
        cu_seqlens: Tensor,
        prefixes: Tensor | None,
        position_ids: Tensor,
        rows: Tensor,
        replay: ReplayedExperts | None,
    ) -> PackedSequences:
        longest = int(cu_seqlens.diff().max())
        on_device = cu_seqlens.to(self.device, torch.int32)
        plan = rope = None
        plan_args = (cu_seqlens, prefixes, self.context_rank, self.context_size)
        if self.own_attention:
            plan = plan_flash(*plan_args, self.device) if self.flash else plan_segments(*plan_args).to(self.device)
        if self.frequencies is not None:
            rope = rope_tables(self.frequencies, position_ids, self.dtype)
        return PackedSequences(
            qkv_format="thd",
            cu_seqlens_q=on_device,
            cu_seqlens_kv=on_device,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            rows=rows,
            plan=plan,
            rope=rope,
            chunks=plan_chunks(cu_seqlens).to(self.device) if self.delta_net else None,
            replay=replay,
        )

    def _experts_to_replay(self, batch: TokenBatch, origin: Tensor) -> ReplayedExperts | None:
        """Return the experts for this rank's routers, which see all rows, or a chunk with sequence parallelism."""
        if self.held_layers is None or batch.routed_experts is None:
            return None
        origin = origin.chunk(self.sequence_size)[self.sequence_rank]
        experts = batch.routed_experts[:, list(self.held_layers)][origin]
        experts[origin < 0] = -1
        return ReplayedExperts(experts.to(self.device).transpose(0, 1).contiguous())


def _sequence_ids(batch: TokenBatch, context_rows: Sequence[Tensor]) -> Tensor:
    """Return each loss row's sequence number, rank by rank, without gaps: objectives need ids below the row count."""
    rows = torch.cat([part if len(part) else part.new_zeros(1) for part in context_rows])
    ids = sequence_ids_from_cu_seqlens(batch.cu_seqlens.cpu(), batch.token_ids.shape[0])[rows]
    return torch.unique(ids, return_inverse=True)[1]


def sequence(token_ids: np.ndarray, routed_experts: np.ndarray | None = None) -> TokenBatch:
    """Return tokens [S] as a micro-batch that scores every token after the first, at temperature 1.

    routed_experts: [at least S - 1, L, k], replayed experts; the router chooses experts for the last token.
    Example: the tokens [5, 7, 2] have the targets [7, 2, 0] and the mask [True, True, False].
    """
    tokens = torch.as_tensor(np.asarray(token_ids), dtype=torch.long)
    size = len(tokens)
    scored = torch.arange(size) < size - 1
    experts = None
    if routed_experts is not None:
        experts = torch.full((size, *routed_experts.shape[1:]), -1, dtype=torch.int16)
        experts[: size - 1] = torch.from_numpy(routed_experts[: size - 1].astype(np.int16))
    return TokenBatch(
        token_ids=tokens,
        position_ids=torch.arange(size),
        cu_seqlens=torch.tensor([0, size], dtype=torch.int32),
        target_ids=torch.where(scored, tokens.roll(-1), 0),
        mask=scored,
        loss_weight=torch.zeros(size),
        routed_experts=experts,
    )


def filler(batch: TokenBatch) -> TokenBatch:
    """Return the first token of `batch` as a separate micro-batch without loss."""
    first = _without_loss(at_rows(batch, torch.zeros(1, dtype=torch.long, device=batch.mask.device)))
    return replace(first, cu_seqlens=batch.cu_seqlens.new_tensor([0, 1]), shared_prefix=None)


def at_rows(batch: TokenBatch, rows: Tensor) -> TokenBatch:
    """Select every per-token field at `rows`, but keep cu_seqlens and shared_prefix of the whole batch.

    Example for a listed column: sampling_mask_ids [5, 7, 2, 9] with counts [2, 1, 1] at rows [0, 2] become [5, 7, 9]
    with counts [2, 1].
    """
    picked = {}
    for name, value in batch.tensors.items():
        column = column_named(name)
        if name in ("cu_seqlens", "shared_prefix"):
            picked[name] = value
        elif column is not None and column.rows == "listed":
            all_counts = batch.tensors[column.counts]
            ends, counts = all_counts.cumsum(0).index_select(0, rows), all_counts.index_select(0, rows)
            # Each entry moves forward by the number of unpicked entries before its row.
            skipped = (ends - counts.cumsum(0)).repeat_interleave(counts)
            picked[name] = value[torch.arange(len(skipped), device=skipped.device) + skipped]
        else:
            picked[name] = value.index_select(0, rows)
    return TokenBatch.from_columns(picked)


def loss_fields(batch: TokenBatch, rows: Tensor, carry: bool) -> TokenBatch:
    """Return the objective's fields at `rows`; without `carry` the rows are masked placeholders."""
    loss = at_rows(replace(batch, routed_experts=None), rows)
    return loss if carry else _without_loss(loss)


def _without_loss(batch: TokenBatch) -> TokenBatch:
    return replace(batch, mask=torch.zeros_like(batch.mask), loss_weight=torch.zeros_like(batch.loss_weight))


def _whole(batch: MicroBatch) -> TokenBatch:
    """Return the loss rows of all context-parallel ranks; a rank without loss rows adds a masked placeholder."""
    parts = [
        loss_fields(batch.host_batch, rows if len(rows) else torch.zeros(1, dtype=torch.long), len(rows) > 0)
        for rows in batch.context_rows
    ]
    tensors = [part.tensors for part in parts]
    merged = {name: torch.cat([rank_tensors[name] for rank_tensors in tensors]) for name in tensors[0]}
    return TokenBatch.from_columns(merged | {"cu_seqlens": batch.host_batch.cu_seqlens})


def _extend(bounds: Tensor, end: int) -> Tensor:
    """Append a padding sequence up to `end` to `bounds`, unless `bounds` already end there."""
    return bounds if int(bounds[-1]) == end else torch.cat((bounds, bounds.new_tensor([end])))


def _padded_rows(cu_seqlens: Tensor, bounds: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the batch row (-1 = padding) and the position of every row between `bounds`."""
    lengths = cu_seqlens.diff()
    padded = bounds.diff()
    sequence = torch.arange(len(padded)).repeat_interleave(padded)
    column = torch.arange(int(bounds[-1])) - bounds[:-1][sequence]
    starts, lengths = (F.pad(x, (0, len(padded) - len(x))) for x in (cu_seqlens[:-1], lengths))
    real = column < lengths[sequence]
    origin = torch.where(real, starts[sequence] + column, -1)
    return origin, torch.where(real, position_ids[origin], column)


def to_device(batch: TokenBatch, device: torch.device) -> TokenBatch:
    return TokenBatch.from_columns({name: tensor.to(device) for name, tensor in batch.tensors.items()})
