"""Define the data from prompt to gradient: plain frozen dataclasses, with numpy arrays until the trainer packs them.

Array sizes:

    P  prompt tokens
    S  tokens after the prompt
    R  tokens after the prompt that the policy sampled: all S, except with `Rollout.spans`
    K  top-K ids
    n  samples per prompt
    T  packed tokens
    L  MoE layers
    k  experts per token

`COLUMNS` declares every per-token value once. Engine replies, continuation, the bank, the bank audit, packing and row
selection iterate over it. To add a value, add a row here, fill the column where an engine reply is decoded, and read
the column in the objective. docs/adding.md ("Adding a per-token value") names the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

if TYPE_CHECKING:
    import torch

T = TypeVar("T", bound="TokenColumns")

SAFETENSORS_DTYPES = {
    f"{kind.upper()}{8 * size}": np.dtype(f"{kind}{size}")
    for kind, sizes in {"i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8)}.items()
    for size in sizes
}
"""numpy dtypes by safetensors name."""


@dataclass(frozen=True, slots=True)
class Column:
    """Describes a per-token value of a response. Values of `rows`:

        sampled  a row for each of the R sampled tokens
        read     a row for each token that the engine read: all P + S except the last
        listed   a variable number of rows for each sampled token, end to end; the column `counts` has these numbers

    Example: two sampled tokens, the first drawn from {5, 7} and the second from {2}. The listed column
    sampling_mask_ids is [5, 7, 2], and the counts column sampling_mask_counts is [2, 1].
    """

    name: str
    dtypes: tuple[str, ...]  # dtypes that engines may report
    rows: Literal["sampled", "read", "listed"]
    shape: tuple[str, ...] = ()  # names of the trailing dimensions; equal names have equal sizes within a group
    counts: str = ""
    # Field of `GenerateRequest`, or value in `GenerateRequest.flags`, that requests all columns with this `asked_by`;
    # "" = always. A flag needs no other code: a request has the flags of the columns that the objective needs.
    asked_by: str = ""
    part: str = "core"  # bank part, see `PARTS`
    stored: str = ""  # name in the bank files, if it differs
    packed: str = ""  # dtype in a `TokenBatch`; "" = not used in training
    fill: int = 0  # value of packed rows that predict no sampled token, or were not read
    token_ids: bool = False  # the values are in [fill, vocabulary)

    @property
    def stored_name(self) -> str:
        return self.stored or self.name


# Bank parts. A rank reads only the parts that it needs (`trainer.batches.parts_of`): core on all ranks, topk and
# sampling_mask for the loss (last pipeline stage), routes for routing replay (ranks with MoE layers).
PARTS = ("core", "topk", "sampling_mask", "routes")

_TOPK = partial(Column, rows="sampled", shape=("K",), asked_by="topk", part="topk")
_TEACHER = partial(Column, rows="sampled", asked_by="teacher", part="topk")
_MASK = partial(Column, dtypes=("int32",), asked_by="sampling_mask", part="sampling_mask", packed="int32")
COLUMNS = [
    # ln mu of the sampled token, at the sampling temperature and normalized over the sampling mask.
    Column("rollout_logprob", ("float32",), "sampled", packed="float32"),
    Column("versions", ("int32",), "sampled"),  # policy version that sampled the token
    # The K most likely tokens. An absent token has id -1.
    _TOPK("topk_ids", ("int32",), packed="int32", fill=-1, token_ids=True),
    _TOPK("rollout_topk_logprob", ("float32",), packed="float32", stored="topk_logprob"),
    # The teacher's ln p of the sampled token and K most likely tokens; -1 = absent. The orchestrator adds them.
    _TEACHER("teacher_logprob", ("float32",), packed="float32"),
    _TEACHER("teacher_ids", ("int32",), shape=("K_teacher",), packed="int32", fill=-1, token_ids=True),
    _TEACHER("teacher_topk_logprob", ("float32",), shape=("K_teacher",), packed="float32"),
    # The sampling mask: the tokens that top-p, top-k and min-p leave to draw from, ascending, with the sampled one.
    _MASK("sampling_mask_ids", rows="listed", counts="sampling_mask_counts", stored="kept_ids", token_ids=True),
    _MASK("sampling_mask_counts", rows="sampled", stored="kept_counts"),
    # The k experts in each of the L MoE layers, in the engine's order of preference, for routing replay.
    Column(
        "routed_experts",
        ("uint8", "uint16"),
        "read",
        ("L", "k"),
        asked_by="routed_experts",
        part="routes",
        packed="int16",
        fill=-1,
    ),
]


def column_named(name: str) -> Any:
    """Return the column with this name, or None if it does not exist."""
    return next((column for column in COLUMNS if column.name == name), None)


class TokenColumns:
    """Contains the `COLUMNS` as fields; `extra` has the columns without a field."""

    __slots__ = ()
    __dataclass_fields__: dict[str, Any]
    extra: Mapping[str, Any]

    def column(self, name: str) -> Any:
        """Return the array of a column, or None if it is absent."""
        return getattr(self, name) if name in self.__dataclass_fields__ else self.extra.get(name)

    @property
    def columns(self) -> dict[str, Any]:
        """Return the present columns, in the order of `COLUMNS`."""
        arrays = ((column.name, self.column(column.name)) for column in COLUMNS)
        return {name: array for name, array in arrays if array is not None}

    @classmethod
    def from_columns(cls: type[T], columns: Mapping[str, Any], **fields: Any) -> T:
        """Build an instance from `columns` and the other `fields`. Columns without a field go into `extra`."""
        fields_of_class = {name: array for name, array in columns.items() if name in cls.__dataclass_fields__}
        fields["extra"] = {name: array for name, array in columns.items() if name not in fields_of_class}
        return cls(**fields, **fields_of_class)


def expected_shapes(
    columns: Mapping[str, Any], sampled: int, read: int, like: Mapping[str, Any], **sizes: int
) -> dict[str, tuple[int, ...]]:
    """Return the shape that each column must have, in the order of `COLUMNS`, including missing columns.

    A trailing dimension's size comes from `sizes`, else from the first column in `like` that has the dimension, else it
    is -1. Example: 3 sampled tokens, 7 read tokens and K = 2 give rollout_logprob (3,), topk_ids (3, 2) and
    routed_experts (7, -1, -1).
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for column in COLUMNS:
        if column.rows == "sampled" and not column.shape:
            shapes[column.name] = (sampled,)
            continue
        rows = sampled if column.rows == "sampled" else read
        if column.rows == "listed":
            rows = int(np.sum(columns[column.counts])) if column.counts in columns else -1
        shape = getattr(like.get(column.name), "shape", ())
        sizes = dict(zip(column.shape, shape[1:], strict=False)) | sizes
        shapes[column.name] = (rows, *(sizes.get(name, -1) for name in column.shape))
    return shapes


def split_columns(
    columns: Mapping[str, np.ndarray], sampled: Sequence[int] | np.ndarray, read: Sequence[int] | np.ndarray | None
) -> list[dict[str, np.ndarray]]:
    """Split the columns of consecutive pieces into views, a dict for each piece.

    sampled: number of sampled tokens in each piece.
    read: number of tokens that the engine read for each piece; None omits the "read" columns.
    Example: sampled [2, 1] splits versions [4, 4, 5] into [4, 4] and [5].
    """
    pieces: list[dict[str, np.ndarray]] = [{} for _ in sampled]
    ends = np.cumsum(sampled)
    for column in COLUMNS:
        array = columns.get(column.name)
        if array is None or (column.rows == "read" and read is None):
            continue
        cuts = ends if column.rows == "sampled" else np.cumsum(read)  # type: ignore[arg-type]
        if column.rows == "listed":
            cuts = np.append(0, np.cumsum(columns[column.counts]))[ends]
        for piece, begin, end in zip(pieces, (0, *cuts[:-1].tolist()), cuts.tolist(), strict=True):
            piece[column.name] = array[begin:end]
    return pieces


def join_columns(pieces: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Join the columns of pieces that were sampled in succession. Omit a column that a piece lacks.

    Each piece read all tokens before it. If several pieces read a token, the first piece's row is used, because that
    policy read the token first. Example: rows [a, b, c] and then [x, y, z, d, e] give [a, b, c, d, e].
    """
    joined = {}
    for column in COLUMNS:
        if not all(column.name in piece for piece in pieces):
            continue
        arrays, done = [piece[column.name] for piece in pieces], 0
        if column.rows == "read":
            for i, array in enumerate(arrays):
                arrays[i], done = array[done:], max(done, len(array))
        joined[column.name] = np.concatenate(arrays)
    return joined


@dataclass(frozen=True, slots=True)
class Prompt:
    """Contains a prompt at a position in the run's prompt order.

    `position` counts prompts from the run start and never repeats (an epoch visits every row once). It therefore
    identifies the prompt across crashes: positions in the bank are done, all others are still to be sampled.
    """

    position: int
    row: int  # line of the source file, from 0
    token_ids: np.ndarray  # [P] int32
    text: str
    answer: str
    columns: dict[str, Any] = field(default_factory=dict)  # the source row, for user rewards
    source: str = ""  # the row's data source, which selects the rewards


POLICY, ENVIRONMENT, INHERITED = range(3)  # span origins: sampled here, from outside, sampled in an earlier branch


@dataclass(frozen=True, slots=True)
class Rollout(TokenColumns):
    """Contains a sampled response with the engine's per-token values, which `COLUMNS` describes.

    With several turns, a rollout is a trajectory branch: a token sequence in which spans mark the sampled tokens.
    Example: two turns with a tool answer of two tokens between them. token_ids [5, 6, 80, 81, 7], spans
    [[POLICY, 2, 0], [ENVIRONMENT, 2, 0], [POLICY, 1, 1]]; R = 3, so rollout_logprob and versions have three values, for
    tokens 5, 6 and 7.
    """

    token_ids: np.ndarray  # [S] int32, including the end-of-sequence token
    rollout_logprob: np.ndarray  # [R] fp32
    versions: np.ndarray  # [R] int32
    finish_reason: str  # "stop" | "length" | "max_turns" | "abort"
    topk_ids: np.ndarray | None = None  # [R, K] int32
    rollout_topk_logprob: np.ndarray | None = None  # [R, K] fp32
    routed_experts: np.ndarray | None = None  # [P + S - 1, L, k] uint8 or uint16
    # [J, 3] int32: origin (POLICY, ENVIRONMENT, INHERITED), tokens, turn. None = a single span, all sampled here.
    spans: np.ndarray | None = None
    sampling_mask_ids: np.ndarray | None = None  # [sum of sampling_mask_counts] int32
    sampling_mask_counts: np.ndarray | None = None  # [R] int32
    # Trajectory number in the group, from 0. Samples with one number are the trajectory's branches, in order. None =
    # the sample is a complete trajectory.
    trajectory: int | None = None
    extra: Mapping[str, np.ndarray] = field(default_factory=dict)
    teacher_logprob: np.ndarray | None = None  # [R] fp32
    teacher_ids: np.ndarray | None = None  # [R, teacher's K] int32
    teacher_topk_logprob: np.ndarray | None = None  # [R, teacher's K] fp32

    @property
    def sampled(self) -> np.ndarray | None:
        """Return [S] bool, True for tokens that the policy sampled here. None means all tokens."""
        return None if self.spans is None else np.repeat(self.spans[:, 0] == POLICY, self.spans[:, 1])


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """Contains all samples for a prompt with their rewards. The bank and the group baseline work on whole groups."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]  # n of them
    rewards: np.ndarray  # [n] fp32, reward of each sample's trajectory
    reward_failed: np.ndarray  # [n] bool: the verifier raised or timed out; the sample carries no loss
    temperature: float
    turn_rewards: tuple[np.ndarray, ...] | None = None  # fp32 [turns] for each trajectory

    @property
    def num_tokens(self) -> int:
        return sum(len(self.prompt.token_ids) + len(r.token_ids) for r in self.rollouts)


@dataclass(frozen=True, slots=True)
class TokenBatch(TokenColumns):
    """Contains a packed micro-batch, with sequences end to end and no padding (Megatron's THD layout).

    Row t predicts `target_ids[t]`, the next token in this sequence. Per-token fields belong to the target; `mask` is
    True where the target carries loss. `loss_weight` is the target's share in the global batch's loss. It is fixed
    before the first micro-batch, so the loss is `sum(loss_weight * loss)` for any split.

    Example, two sequences with prompts [1, 2] and [3], responses [5, 7] and [9]: token_ids [1, 2, 5, 7, 3, 9],
    cu_seqlens [0, 4, 6], position_ids [0, 1, 2, 3, 0, 1], target_ids [0, 5, 7, 0, 9, 0], mask [F, T, T, F, T, F]. Row 2
    predicts token 7 and has that log-prob.
    """

    token_ids: torch.Tensor  # [T] int64
    position_ids: torch.Tensor  # [T] int64
    cu_seqlens: torch.Tensor  # [B + 1] int32
    target_ids: torch.Tensor  # [T] int64, 0 where mask is False
    mask: torch.Tensor  # [T] bool
    loss_weight: torch.Tensor  # [T] fp32, 0 where mask is False
    advantage: torch.Tensor | None = None  # [T] fp32
    rollout_logprob: torch.Tensor | None = None  # [T] fp32, ln mu, as reported by the engine
    temperature: torch.Tensor | None = None  # [T] fp32; None = 1
    topk_ids: torch.Tensor | None = None  # [T, K] int32, -1 = absent
    rollout_topk_logprob: torch.Tensor | None = None  # [T, K] fp32
    # Sampling masks of all targets, end to end; None = the whole vocabulary for each target.
    sampling_mask_ids: torch.Tensor | None = None  # [sum of sampling_mask_counts] int32
    sampling_mask_counts: torch.Tensor | None = None  # [T] int32, 0 where mask is False
    # Computed by the trainer before the step's first update, if the objective needs it.
    old_logprob: torch.Tensor | None = None  # [T] fp32, by the weights before the step
    old_topk_logprob: torch.Tensor | None = None  # [T, K] fp32, of topk_ids by these weights
    old_other_logprob: torch.Tensor | None = None  # [T] fp32, of all tokens except topk_ids and the target
    reference_logprob: torch.Tensor | None = None  # [T] fp32, by the run's start model
    # First tokens that a sequence shares with the previous sequence; computed once where possible. All sequences that
    # continue a prefix have the same number.
    shared_prefix: torch.Tensor | None = None  # [B] int32, how many; 0 = none
    # Routing replay: the experts of each MoE layer for token_ids[t], -1 where the trainer chooses.
    routed_experts: torch.Tensor | None = None  # [T, L, k] int16
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all present tensors by name, including the tensors in `extra`."""
        columns = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "extra"}
        return {name: tensor for name, tensor in {**columns, **self.extra}.items() if tensor is not None}
