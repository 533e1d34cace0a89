"""Compute the offset of each tensor in a group's blob; the writer, the index line and readers share this code."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dppo_megatron.types import COLUMNS, PARTS, RolloutGroup, column_named
from dppo_megatron.types import SAFETENSORS_DTYPES as DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Columns with separate fields in the index line, from before `columns` and `listed` existed.
_INDEXED = ("rollout_logprob", "versions", "topk_ids", "rollout_topk_logprob", "sampling_mask_ids",
            "sampling_mask_counts", "routed_experts")  # fmt: skip
Tensor = tuple[str, str, tuple[int, ...]]  # name, safetensors dtype, shape


@dataclass(frozen=True, slots=True)
class Shapes:
    """Contains the sizes that determine where a group's tensors begin. Lists have a number for each sample.

    Example: a prompt with 5 tokens, samples with 3 and 2 tokens and top-2 lists. prompt 5, tokens [3, 2], sampled
    [3, 2], spans [1, 1], columns {"rollout_logprob": ("F32", ()), "versions": ("I32", ()), "topk_ids": ("I32", (2,)),
    ...}, list_lengths {}. Sample 0 has 3 * 4 bytes of ids at byte 5 * 4, then a span of 12 bytes, and so on.
    """

    prompt: int  # tokens
    tokens: list[int]  # after the prompt, S
    sampled: list[int]  # tokens that the policy sampled, R
    spans: list[int]  # J
    columns: dict[str, tuple[str, tuple[int, ...]]]  # dtype and trailing shape of the group's columns
    list_lengths: dict[str, list[int]]  # entries in columns with a variable number for each token

    @classmethod
    def from_group(cls, group: RolloutGroup) -> Shapes:
        sample_columns = [rollout.columns for rollout in group.rollouts]
        list_names = [c.name for c in COLUMNS if c.rows == "listed" and c.name in sample_columns[0]]
        return cls(
            prompt=len(group.prompt.token_ids),
            tokens=[len(r.token_ids) for r in group.rollouts],
            sampled=[len(r.versions) for r in group.rollouts],
            spans=[1 if r.spans is None else len(r.spans) for r in group.rollouts],
            columns={name: (_NAMES[array.dtype], array.shape[1:]) for name, array in sample_columns[0].items()},
            list_lengths={name: [len(columns[name]) for columns in sample_columns] for name in list_names},
        )

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], core: Sequence[int] = ()) -> Shapes:
        """Build the shapes from the fields in an index line; the inverse of `fields`.

        core: bytes of each sample's core part, which determine the number of spans. Without `core`, each sample has a
        single span. Raises `ValueError` for a column that this version does not know.
        """
        tokens, spans = fields["lengths"], fields.get("spans")
        columns: dict[str, tuple[str, tuple[int, ...]]] = {"rollout_logprob": ("F32", ()), "versions": ("I32", ())}
        if k := fields["topk"]:
            columns |= {"topk_ids": ("I32", (k,)), "rollout_topk_logprob": ("F32", (k,))}
        if "kept" in fields:
            columns |= {"sampling_mask_ids": ("I32", ()), "sampling_mask_counts": ("I32", ())}
        if routing := fields["routing"]:
            columns["routed_experts"] = f"U{8 * routing[2]}", tuple(routing[:2])
        columns |= {name: (dtype, tuple(shape)) for name, (dtype, *shape) in fields.get("columns", {}).items()}
        if unknown := [name for name in columns if column_named(name) is None]:
            raise ValueError(f"columns {', '.join(unknown)}, which this version does not know")
        shapes = cls(
            prompt=fields["prompt_tokens"],
            tokens=tokens,
            sampled=tokens if spans is None else [policy for policy, _, _ in spans],
            spans=[0 if core else 1] * len(tokens),
            columns=columns,
            list_lengths=({"sampling_mask_ids": fields["kept"]} if "kept" in fields else {}) | fields.get("listed", {}),
        )
        for i, size in enumerate(core):
            shapes.spans[i] = (size - sum(tensor_bytes(*tensor[1:]) for tensor in shapes.parts(i)[0])) // 12
        return shapes

    def fields(self) -> dict[str, Any]:
        """Return the index line fields from which `from_fields` restores the columns."""
        topk, routing = self.columns.get("topk_ids"), self.columns.get("routed_experts")
        other_columns = {name: [dtype, *shape] for name, (dtype, shape) in self.columns.items() if name not in _INDEXED}
        list_sizes = {name: sizes for name, sizes in self.list_lengths.items() if name not in _INDEXED}
        return {
            "topk": 0 if topk is None else topk[1][0],
            "routing": None if routing is None else [*routing[1], DTYPES[routing[0]].itemsize],
            **({"kept": self.list_lengths["sampling_mask_ids"]} if "sampling_mask_ids" in self.list_lengths else {}),
            **({"columns": other_columns} if other_columns else {}),
            **({"listed": list_sizes} if list_sizes else {}),
        }

    def parts(self, i: int) -> tuple[list[Tensor], ...]:
        """Return the tensors of sample i: a list for each part, in the order of `PARTS`."""
        s = self.tokens[i]
        rows = {"sampled": self.sampled[i], "read": self.prompt + s - 1}
        tensors: dict[str, list[Tensor]] = {part: [] for part in PARTS}
        tensors["core"] = [("ids", "I32", (s,)), ("spans", "I32", (self.spans[i], 3))]
        for column in COLUMNS:
            if column.name in self.columns:
                dtype, shape = self.columns[column.name]
                size = self.list_lengths[column.name][i] if column.rows == "listed" else rows[column.rows]
                tensors[column.part].append((column.stored_name, dtype, (size, *shape)))
        return tuple(tensors.values())

    def table(self) -> dict[str, dict[str, Any]]:
        """Return the header entries for all tensors, in blob order."""
        tensors: list[Tensor] = [("prompt.ids", "I32", (self.prompt,))]
        for i in range(len(self.tokens)):
            tensors += [(f"s{i}.{name}", dtype, shape) for part in self.parts(i) for name, dtype, shape in part]
        entries, end = {}, 0
        for name, dtype, shape in tensors:
            begin, end = end, end + tensor_bytes(dtype, shape)
            entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        return entries


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * DTYPES[dtype].itemsize
