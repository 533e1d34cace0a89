"""A micro-batch as the model reads it: packed sequences, their attention plan, the rows that carry loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from dppo_megatron.types import TokenBatch

from .attention import SegmentPlan, plan_segments
from .rope import rope_tables

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of packed sequences, with what our own layers read from it.

    rows: [n] packed rows whose hidden states the head is given, at least one.
    plan, rope: for `PackedAttention`; None where TransformerEngine attends and Megatron rotates.
    """

    rows: Int[Tensor, " n"] | None = None
    plan: SegmentPlan | None = None
    rope: tuple[Float[Tensor, "T 1 d"], Float[Tensor, "T 1 d"]] | None = None


@dataclass(frozen=True)
class MicroBatch:
    """A `TokenBatch` on its device: the whole of it for the model, and the loss rows alone for the objective.

    `loss` holds the per-token fields of the n rows in `packed.rows`; its token_ids and position_ids are
    theirs too.
    """

    token_ids: Int[Tensor, "1 T"]
    position_ids: Int[Tensor, "1 T"]
    packed: PackedSequences
    loss: TokenBatch
    num_tokens: int  # T as given, without padding
    num_loss_tokens: int


@dataclass(frozen=True)
class Packer:
    """Turns token batches into micro-batches for one model.

    frequencies: inverse rope frequencies where our own attention rotates, else None.
    multiple: T is padded to a multiple of it (sequence parallelism splits T evenly).
    round_size: a pass takes a multiple of so many micro-batches (the interleaved pipeline schedule does).
    """

    device: torch.device
    dtype: torch.dtype
    frequencies: Float[Tensor, " d/2"] | None
    multiple: int = 1
    round_size: int = 1

    def whole_rounds(self, batches: Sequence[TokenBatch]) -> list[MicroBatch]:
        """The micro-batches of one pass, then fillers up to whole rounds. Raises ValueError without any."""
        if not batches:
            raise ValueError("an update needs at least one micro-batch")
        missing = -len(batches) % self.round_size
        return [self(batch) for batch in [*batches, *[filler(batches[0])] * missing]]

    def __call__(self, batch: TokenBatch) -> MicroBatch:
        """Copies to the device. Raises ValueError for a batch without tokens or with an empty sequence."""
        num_tokens = batch.token_ids.shape[0]
        if num_tokens == 0:
            raise ValueError("a micro-batch must hold at least one token")
        rows = batch.mask.nonzero().flatten()
        num_loss_tokens = len(rows)
        if num_loss_tokens == 0:  # the head and its collectives still run, on a row that the mask leaves out
            rows = torch.zeros(1, dtype=torch.long, device=batch.mask.device)
        loss = _at_rows(batch, rows)
        whole = _padded(batch, -num_tokens % self.multiple)
        position_ids = whole.position_ids.to(self.device)
        return MicroBatch(
            token_ids=whole.token_ids.to(self.device)[None],
            position_ids=position_ids[None],
            packed=self._packed(whole.cu_seqlens.cpu(), position_ids, rows.to(self.device)),
            loss=_to(loss, self.device),
            num_tokens=num_tokens,
            num_loss_tokens=num_loss_tokens,
        )

    def _packed(self, cu_seqlens: Tensor, position_ids: Tensor, rows: Tensor) -> PackedSequences:
        longest = int(cu_seqlens.diff().max())
        on_device = cu_seqlens.to(self.device, torch.int32)
        plan = rope = None
        if self.frequencies is not None:
            plan = plan_segments(cu_seqlens)
            plan = replace(plan, pad_rows=plan.pad_rows.to(self.device), packed_rows=plan.packed_rows.to(self.device))
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
        )


def filler(batch: TokenBatch) -> TokenBatch:
    """The first token of `batch` as a micro-batch of its own that carries no loss."""
    first = _at_rows(batch, torch.zeros(1, dtype=torch.long, device=batch.mask.device))
    return replace(
        first,
        cu_seqlens=batch.cu_seqlens.new_tensor([0, 1]),
        mask=torch.zeros_like(first.mask),
        loss_weight=torch.zeros_like(first.loss_weight),
    )


def _at_rows(batch: TokenBatch, rows: Tensor) -> TokenBatch:
    """Every per-token field at `rows`; cu_seqlens stays that of the whole batch."""
    picked = {
        f.name: value if f.name == "cu_seqlens" or value is None else value.index_select(0, rows)
        for f in fields(TokenBatch)
        for value in (getattr(batch, f.name),)
    }
    return TokenBatch(**picked)


def _padded(batch: TokenBatch, count: int) -> TokenBatch:
    """`count` more tokens as one more sequence, in what the model reads; the loss rows lie before it."""
    if count == 0:
        return batch
    end = batch.cu_seqlens[-1:] + count
    return replace(
        batch,
        token_ids=F.pad(batch.token_ids, (0, count)),
        position_ids=torch.cat((batch.position_ids, torch.arange(count).to(batch.position_ids))),
        cu_seqlens=torch.cat((batch.cu_seqlens, end)),
    )


def _to(batch: TokenBatch, device: torch.device) -> TokenBatch:
    moved = {f.name: getattr(batch, f.name) for f in fields(TokenBatch)}
    return TokenBatch(**{name: None if v is None else v.to(device) for name, v in moved.items()})
