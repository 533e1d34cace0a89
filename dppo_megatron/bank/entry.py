"""Describe a group by its index line. Training is planned from index lines, without opening the groups' blobs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .shapes import Shapes


@dataclass(frozen=True, slots=True)
class BankEntry:
    """Contains a group's index line: all data except the tokens."""

    number: int  # index in the training order, from 0
    segment: int
    line: int  # line in the segment's index, from 1
    position: int  # index in the prompt order
    row: int  # line in the prompt file, from 0
    offset: int  # bytes into the segment's .bin
    size: int  # bytes
    prompt_tokens: int
    response_lengths: np.ndarray  # [n] int32, tokens after the prompt
    rewards: np.ndarray  # [n] fp32
    reward_failed: np.ndarray  # [n] bool, True if the verifier gave no reward
    truncated: np.ndarray  # [n] bool, cut at the length limit
    min_version: int  # oldest policy version of any sampled token; -1 when there is none
    max_version: int
    version_sum: int  # over all sampled tokens
    finish_reasons: dict[str, int]
    temperature: float
    topk: int  # K of the top-K log-probs per token, 0 = none
    time: float  # seconds since the epoch, when written
    shapes: Shapes
    front: tuple[int, int]  # bytes and crc32 of the blob before the first sample: header and prompt ids
    parts: np.ndarray  # [n, 4] int64, bytes of each part, in the order of `types.PARTS`
    part_crc: np.ndarray  # [n, 4] int64
    routing: tuple[int, int] | None = None  # (layers with experts, experts per token) where routing is stored
    spans: np.ndarray | None = None  # [n, 3] int32, tokens by span origin; None: the policy sampled all
    trajectory: tuple[int, ...] | None = None  # a number per sample; None: each sample is a complete trajectory
    turn_rewards: tuple[np.ndarray, ...] | None = None  # fp32, for every trajectory

    @property
    def num_samples(self) -> int:
        return len(self.response_lengths)

    @property
    def sampled(self) -> np.ndarray:
        """Return [n] int32, how many tokens the policy sampled; these have a log-prob and a version."""
        return self.response_lengths if self.spans is None else self.spans[:, 0]

    @property
    def trajectories(self) -> np.ndarray:
        """Return [n] int, every sample's trajectory number, ascending from 0."""
        return np.arange(self.num_samples) if self.trajectory is None else np.array(self.trajectory)

    @property
    def first_of_trajectories(self) -> np.ndarray:
        """Return [trajectories] int, the first sample of each. All branches in a trajectory have equal rewards."""
        return np.flatnonzero(np.diff(self.trajectories, prepend=-1))

    @property
    def has_sampling_mask(self) -> bool:
        """Return whether the tokens were drawn from a subset of the vocabulary."""
        return "sampling_mask_ids" in self.shapes.columns
