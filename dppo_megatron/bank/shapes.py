"""Where the tensors of a group lie in its blob: one place that the writer, the index line and readers agree on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dppo_megatron.types import RolloutGroup

PARTS = ("core", "topk", "mask", "routes")
DTYPES = {"I32": np.int32, "F32": np.float32, "U8": np.uint8, "U16": np.uint16}
_BYTES = {name: np.dtype(dtype).itemsize for name, dtype in DTYPES.items()}
Tensor = tuple[str, str, tuple[int, ...]]  # name, safetensors dtype, shape


@dataclass(frozen=True, slots=True)
class Shapes:
    """What the places of a group's tensors follow from. Lists have a number for each sample."""

    prompt: int  # tokens
    tokens: list[int]  # after the prompt, S
    sampled: list[int]  # of them by the policy, R
    spans: list[int]  # J
    topk: int  # K, 0 = no lists
    kept: list[int] | None  # ids of the sampling mask in all
    routing: tuple[int, int, int] | None  # layers, experts per token, bytes of an expert's number

    @classmethod
    def of(cls, group: RolloutGroup) -> Shapes:
        rollouts = group.rollouts
        first = rollouts[0]
        routed = first.routed_experts
        return cls(
            prompt=len(group.prompt.token_ids),
            tokens=[len(r.token_ids) for r in rollouts],
            sampled=[len(r.versions) for r in rollouts],
            spans=[1 if r.spans is None else len(r.spans) for r in rollouts],
            topk=0 if first.topk_ids is None else first.topk_ids.shape[1],
            kept=None if first.kept_ids is None else [len(r.kept_ids) for r in rollouts],  # type: ignore[arg-type]
            routing=None if routed is None else (routed.shape[1], routed.shape[2], routed.itemsize),
        )

    def parts(self, i: int) -> tuple[list[Tensor], ...]:
        """The tensors of each part of sample i."""
        s, r = self.tokens[i], self.sampled[i]
        core: list[Tensor] = [
            ("ids", "I32", (s,)),
            ("spans", "I32", (self.spans[i], 3)),
            ("rollout_logprob", "F32", (r,)),
            ("versions", "I32", (r,)),
        ]
        topk: list[Tensor] = []
        mask: list[Tensor] = []
        routes: list[Tensor] = []
        if self.topk:
            topk = [("topk_ids", "I32", (r, self.topk)), ("topk_logprob", "F32", (r, self.topk))]
        if self.kept is not None:
            mask = [("kept_ids", "I32", (self.kept[i],)), ("kept_counts", "I32", (r,))]
        if self.routing is not None:
            layers, each, width = self.routing
            routes = [("routed_experts", f"U{8 * width}", (self.prompt + s - 1, layers, each))]
        return core, topk, mask, routes

    def table(self) -> dict[str, dict[str, Any]]:
        """The header's entries of all tensors, in the order in which they lie."""
        tensors: list[Tensor] = [("prompt.ids", "I32", (self.prompt,))]
        for i in range(len(self.tokens)):
            tensors += [(f"s{i}.{name}", *rest) for part in self.parts(i) for name, *rest in part]  # type: ignore[misc]
        entries, end = {}, 0
        for name, dtype, shape in tensors:
            begin, end = end, end + tensor_bytes(dtype, shape)
            entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        return entries

    def text(self) -> str:
        """`table` as the writer's JSON has it, without the opening brace.

        A reader needs it of every group that it opens, and to write it is faster than to parse the header's.
        """
        entries, end = [], 0
        tensors: list[Tensor] = [("prompt.ids", "I32", (self.prompt,))]
        for i in range(len(self.tokens)):
            tensors += [(f"s{i}.{name}", dtype, shape) for part in self.parts(i) for name, dtype, shape in part]
        for name, dtype, shape in tensors:
            begin, end = end, end + math.prod(shape) * _BYTES[dtype]
            sizes = ",".join(map(str, shape))
            entries.append(f'"{name}":{{"dtype":"{dtype}","shape":[{sizes}],"data_offsets":[{begin},{end}]}}')
        return ",".join(entries) + "}"


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * _BYTES[dtype]
