"""What a bank looks like on disk, shared by its one writer and its many readers.

A bank is a directory of numbered segments, two files each:

- `segment-000012.bin`: safetensors blobs end to end, one per group;
- `segment-000012.jsonl`: one line per record, "group" (where its blob lies, its crc32 and what a reader may
  want to know without opening it) or "dropped" (a prompt that is done but yields nothing to train on).

A record exists once its index line, newline included, is on disk; the blob is written before it.
To save space, `.bin` files that nothing will train on again may be deleted, except the last one. Every
`.jsonl` file must stay, because together they are the prompt cursor.
"""

from __future__ import annotations

import json
import re
import time
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from dppo_megatron.errors import ExpectedError
from dppo_megatron.types import Prompt, Rollout, RolloutGroup

FORMAT = "1"
LOCK_NAME = "writer.lock"
FINISH_REASONS = ("stop", "length", "abort")

# `kind`, `position` and `row` come first on every line, so a scan need not parse the rest.
RECORD_HEAD = re.compile(rb'\{"kind":"(group|dropped)","position":(\d+),"row":(\d+)[,}]')
GROUP_HEAD = b'{"kind":"group",'


class BankError(ExpectedError, RuntimeError):
    """Anything wrong with a bank; the message names the file and the remedy."""


class BankLocked(BankError):
    """Another process holds the bank for writing."""


class BankWriteError(BankError):
    """A record could not be written. It was rolled back; every earlier record is intact.

    `errno` is that of the operating system, e.g. `errno.ENOSPC`.
    """

    def __init__(self, message: str, errno: int | None = None):
        super().__init__(message)
        self.errno = errno


class BankCorruption(BankError):
    """Bytes on disk contradict the index in a place that a crash while writing cannot explain."""


class BankTimeout(BankError, TimeoutError):
    """The groups waited for did not arrive."""


@dataclass(frozen=True, slots=True)
class BankEntry:
    """The index line of one group: everything but its tokens."""

    number: int  # place in the training order: groups of the bank counted from 0
    segment: int
    record: int  # line of the segment's index, from 0; dropped records count
    position: int  # place in the prompt order
    row: int  # line of the prompt file, from 0
    offset: int  # bytes into the segment's .bin
    size: int  # bytes
    crc32: int
    prompt_tokens: int
    response_lengths: np.ndarray  # [n] int32
    rewards: np.ndarray  # [n] fp32
    reward_failed: np.ndarray  # [n] bool, the verifier gave no reward
    truncated: np.ndarray  # [n] bool, ended by the length limit
    min_version: int  # oldest policy version that sampled any token; -1 when there is none
    max_version: int
    version_sum: int  # over all response tokens
    finish_reasons: dict[str, int]
    temperature: float
    topk: int  # K of the top-K log-probs per token, 0 = none
    time: float  # seconds since the epoch, when written
    routing: tuple[int, int] | None = None  # (layers with experts, experts per token) where routing is stored

    @property
    def num_samples(self) -> int:
        return len(self.response_lengths)

    @property
    def tokens(self) -> int:
        """Prompt and response tokens of all samples, as `RolloutGroup.num_tokens`."""
        return self.prompt_tokens * len(self.response_lengths) + int(self.response_lengths.sum())


def segment_paths(directory: Path, number: int) -> tuple[Path, Path]:
    """(.bin, .jsonl) of a segment."""
    stem = f"segment-{number:06d}"
    return directory / f"{stem}.bin", directory / f"{stem}.jsonl"


def segment_numbers(directory: Path) -> list[int]:
    """Segments with an index file, ascending. Raises `BankCorruption` when one is missing in between."""
    numbers = sorted(int(path.stem.removeprefix("segment-")) for path in directory.glob("segment-*.jsonl"))
    if numbers != list(range(len(numbers))):
        missing = min(set(range(len(numbers))) - set(numbers))
        raise BankCorruption(
            f"{segment_paths(directory, missing)[1]}: missing, though later segments exist. Index files are "
            "the prompt cursor and must not be deleted; restore it, or start a new run directory"
        )
    return numbers


def encode_group(group: RolloutGroup) -> bytes:
    """The blob of a group. Raises `ValueError` for arrays of wrong length or dtype, or not finite.

    Kept of the prompt: position, row, token ids, text and answer; not `columns` (`row` names the source
    line).
    """
    _check(group)
    rollouts = group.rollouts
    tensors = {
        "prompt_ids": np.ascontiguousarray(group.prompt.token_ids),
        "lengths": np.array([len(r.token_ids) for r in rollouts], dtype=np.int32),
        "response_ids": np.concatenate([r.token_ids for r in rollouts]),
        "logprobs": np.concatenate([r.rollout_logprob for r in rollouts]),
        "versions": np.concatenate([r.versions for r in rollouts]),
        "rewards": np.ascontiguousarray(group.rewards),
        "reward_failed": np.ascontiguousarray(group.reward_failed),
    }
    if rollouts[0].topk_ids is not None:
        tensors["topk_ids"] = np.concatenate([r.topk_ids for r in rollouts])
        tensors["topk_logprobs"] = np.concatenate([r.rollout_topk_logprob for r in rollouts])
    if rollouts[0].routed_experts is not None:
        tensors["routed_experts"] = np.concatenate([r.routed_experts for r in rollouts])
    metadata = {
        "format": FORMAT,
        "position": str(group.prompt.position),
        "row": str(group.prompt.row),
        "temperature": repr(float(group.temperature)),
        "finish_reasons": ",".join(r.finish_reason for r in rollouts),
        "text": group.prompt.text,
        "answer": group.prompt.answer,
    }
    return save_tensors(tensors, metadata=metadata)


def decode_group(blob: bytes) -> RolloutGroup:
    """Inverse of `encode_group`. Raises `ValueError` for a blob of another format version."""
    header_size = int.from_bytes(blob[:8], "little")
    metadata = json.loads(blob[8 : 8 + header_size]).get("__metadata__", {})
    if metadata.get("format") != FORMAT:
        raise ValueError(f"bank format {metadata.get('format')!r}, this version reads {FORMAT!r}")
    tensors = load_tensors(blob)
    lengths = tensors["lengths"]

    def split(name: str, more: int = 0) -> list[Any]:
        ends = np.cumsum(lengths + more)[:-1]
        return np.split(tensors[name], ends) if name in tensors else [None] * len(lengths)

    parts = zip(
        split("response_ids"),
        split("logprobs"),
        split("versions"),
        metadata["finish_reasons"].split(","),
        split("topk_ids"),
        split("topk_logprobs"),
        split("routed_experts", len(tensors["prompt_ids"]) - 1),
        strict=True,
    )
    prompt = Prompt(
        position=int(metadata["position"]),
        row=int(metadata["row"]),
        token_ids=tensors["prompt_ids"],
        text=metadata["text"],
        answer=metadata["answer"],
    )
    return RolloutGroup(
        prompt=prompt,
        rollouts=tuple(Rollout(*part) for part in parts),
        rewards=tensors["rewards"],
        reward_failed=tensors["reward_failed"],
        temperature=float(metadata["temperature"]),
    )


def group_line(group: RolloutGroup, offset: int, blob: bytes) -> bytes:
    """The index line of a group whose blob starts at `offset`, newline included."""
    versions = [r.versions for r in group.rollouts if len(r.versions)]
    topk, routed = group.rollouts[0].topk_ids, group.rollouts[0].routed_experts
    return _line(
        kind="group",
        position=int(group.prompt.position),
        row=int(group.prompt.row),
        offset=offset,
        bytes=len(blob),
        crc32=zlib.crc32(blob),
        n=len(group.rollouts),
        tokens=group.num_tokens,
        prompt_tokens=len(group.prompt.token_ids),
        lengths=[len(r.token_ids) for r in group.rollouts],
        rewards=group.rewards.tolist(),
        failed=np.flatnonzero(group.reward_failed).tolist(),
        truncated=[i for i, r in enumerate(group.rollouts) if r.finish_reason == "length"],
        min_version=min((int(v.min()) for v in versions), default=-1),
        max_version=max((int(v.max()) for v in versions), default=-1),
        version_sum=sum(int(v.sum(dtype=np.int64)) for v in versions),
        finish=Counter(r.finish_reason for r in group.rollouts),
        temperature=float(group.temperature),
        topk=0 if topk is None else topk.shape[1],
        routing=None if routed is None else routed.shape[1:],
        time=round(time.time(), 3),
    )


def dropped_line(position: int, row: int, reason: str, detail: str) -> bytes:
    """The index line of a prompt that is done without a group, newline included."""
    return _line(kind="dropped", position=position, row=row, reason=reason, detail=detail, time=round(time.time(), 3))


def parse_group_line(line: bytes, number: int, segment: int, record: int) -> BankEntry:
    """Raises `ValueError` or `KeyError` for a line that is not a group's."""
    fields = json.loads(line)
    routing = fields.get("routing")

    def samples(indices: list[int]) -> np.ndarray:
        chosen = np.zeros(fields["n"], dtype=bool)
        chosen[indices] = True
        return chosen

    return BankEntry(
        number=number,
        segment=segment,
        record=record,
        position=fields["position"],
        row=fields["row"],
        offset=fields["offset"],
        size=fields["bytes"],
        crc32=fields["crc32"],
        prompt_tokens=fields["prompt_tokens"],
        response_lengths=np.array(fields["lengths"], dtype=np.int32),
        rewards=np.array(fields["rewards"], dtype=np.float32),
        reward_failed=samples(fields["failed"]),
        truncated=samples(fields["truncated"]),
        min_version=fields["min_version"],
        max_version=fields["max_version"],
        # Banks of earlier releases lack it; their tokens count as being of the group's oldest version.
        version_sum=fields.get("version_sum", fields["min_version"] * sum(fields["lengths"])),
        finish_reasons=fields["finish"],
        temperature=fields["temperature"],
        topk=fields["topk"],
        time=fields["time"],
        routing=None if routing is None else tuple(routing),
    )


def _line(**fields: Any) -> bytes:
    return json.dumps(fields, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _check(group: RolloutGroup) -> None:
    where = f"group of prompt position {group.prompt.position}"
    n = len(group.rollouts)
    if n == 0:
        raise ValueError(f"{where}: no rollouts; record the prompt with drop() instead")
    if group.prompt.position < 0 or group.prompt.row < 0:
        raise ValueError(f"{where}: position and row count from 0")
    _expect(group.prompt.token_ids, np.int32, (len(group.prompt.token_ids),), f"{where}: prompt token_ids")
    _expect(group.rewards, np.float32, (n,), f"{where}: rewards")
    _expect(group.reward_failed, np.bool_, (n,), f"{where}: reward_failed")
    if not np.isfinite(group.rewards).all():
        raise ValueError(f"{where}: rewards hold {group.rewards}; a failed verifier scores 0 with reward_failed set")
    if not (np.isfinite(group.temperature) and group.temperature > 0):
        raise ValueError(f"{where}: temperature is {group.temperature}, expected > 0")
    topk = group.rollouts[0].topk_ids
    for i, r in enumerate(group.rollouts):
        size = len(r.token_ids)
        _expect(r.token_ids, np.int32, (size,), f"{where}, sample {i}: token_ids")
        _expect(r.rollout_logprob, np.float32, (size,), f"{where}, sample {i}: rollout_logprob")
        _expect(r.versions, np.int32, (size,), f"{where}, sample {i}: versions")
        if r.finish_reason not in FINISH_REASONS:
            raise ValueError(
                f"{where}, sample {i}: finish_reason {r.finish_reason!r}, expected one of {FINISH_REASONS}"
            )
        if not np.isfinite(r.rollout_logprob).all():
            raise ValueError(f"{where}, sample {i}: a sampled token has a log-prob that is not finite")
        if (r.topk_ids is None) != (topk is None) or (r.rollout_topk_logprob is None) != (topk is None):
            raise ValueError(f"{where}, sample {i}: top-K ids and log-probs must be present in all samples or in none")
        if topk is not None:
            shape = (size, *topk.shape[1:])
            _expect(r.topk_ids, np.int32, shape, f"{where}, sample {i}: topk_ids")
            _expect(r.rollout_topk_logprob, np.float32, shape, f"{where}, sample {i}: rollout_topk_logprob")
        _check_routing(r, group, f"{where}, sample {i}: routed_experts")


def _check_routing(rollout: Rollout, group: RolloutGroup, what: str) -> None:
    routed, first = rollout.routed_experts, group.rollouts[0].routed_experts
    if (routed is None) != (first is None):
        raise ValueError(f"{what}: must be present in all samples or in none")
    if routed is None or first is None:
        return
    read = len(group.prompt.token_ids) + len(rollout.token_ids) - 1
    dtype = routed.dtype if routed.dtype in (np.uint8, np.uint16) else np.uint8
    _expect(routed, dtype, (read, *first.shape[1:]), what)
    if routed.ndim != 3:
        raise ValueError(f"{what}: expected [tokens, layers, experts per token], found {routed.shape}")
    if (np.diff(np.sort(routed, axis=2), axis=2) == 0).any():
        raise ValueError(f"{what}: a token was sent to the same expert twice")


def _expect(array: Any, dtype: Any, shape: tuple[int, ...], what: str) -> None:
    # No silent cast: log-probs that went through half precision would bias every ratio unseen.
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != shape:
        found = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise ValueError(f"{what}: expected numpy {np.dtype(dtype).name} {shape}, found {found}")
