"""Encode and decode a group's blob: a safetensors file with independently readable samples.

The tensors are `prompt.ids`, then four parts per sample: core, top-K, sampling mask, routes. Each part is contiguous.
`Shapes`, from the index line, determines all offsets. Equal groups have equal bytes.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dppo_megatron.types import COLUMNS, PARTS, POLICY, Prompt, Rollout, RolloutGroup

from .entry import BankEntry
from .shapes import DTYPES, Shapes, tensor_bytes


@dataclass(frozen=True, slots=True)
class Encoded:
    """Represents a blob as a list of buffers, with sizes and checksums for the index line."""

    buffers: list[np.ndarray]  # uint8, consecutive; sample buffers are the group's arrays, not copies
    size: int
    front: tuple[int, int]  # bytes and crc32 of header and prompt ids
    parts: list[list[int]]  # bytes of each part, for every sample
    crc: list[list[int]]
    shapes: Shapes


def encode_group(group: RolloutGroup) -> Encoded:
    """Encode a group that passed `checks.check_group`.

    The prompt's `columns` are not stored, because `row` names the source line.
    """
    shapes, prompt = Shapes.from_group(group), group.prompt
    trajectory = None if group.rollouts[0].trajectory is None else [r.trajectory for r in group.rollouts]
    metadata = _indexed_metadata(group, prompt.position, prompt.row, trajectory)
    metadata |= {"answer": prompt.answer, "text": prompt.text}
    metadata["finish_reasons"] = ",".join(r.finish_reason for r in group.rollouts)
    present = {name: value for name, value in sorted(metadata.items()) if value is not None}
    header = json.dumps({"__metadata__": present, **shapes.table()}, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    front = len(header).to_bytes(8, "little") + header + np.ascontiguousarray(prompt.token_ids).tobytes()
    buffers = [np.frombuffer(front, np.uint8)]
    sizes, crcs = [], []
    for i, rollout in enumerate(group.rollouts):
        stored = _stored(rollout)
        parts = [[_bytes(stored[name]) for name, _, _ in part] for part in shapes.parts(i)]
        sizes.append([sum(map(len, part)) for part in parts])
        crcs.append([_crc(part) for part in parts])
        buffers += [buffer for part in parts for buffer in part]
    return Encoded(buffers, sum(map(len, buffers)), (len(front), zlib.crc32(front)), sizes, crcs, shapes)


def _stored(rollout: Rollout) -> dict[str, np.ndarray]:
    """Return a sample's arrays by name in the blob."""
    spans = np.array([[POLICY, len(rollout.token_ids), 0]], np.int32) if rollout.spans is None else rollout.spans
    columns = {c.stored_name: rollout.column(c.name) for c in COLUMNS}
    return {"ids": rollout.token_ids, "spans": spans, **columns}


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _crc(buffers: list[np.ndarray]) -> int:
    crc = 0
    for buffer in buffers:
        crc = zlib.crc32(buffer.data, crc)
    return crc


def _indexed_metadata(
    group: RolloutGroup | BankEntry, position: int, row: int, trajectory: Sequence[int | None] | None
) -> dict[str, str | None]:
    """Return the header fields that the index line has too; None for an absent field."""
    rewards = group.turn_rewards
    return {
        "format": "2",
        "position": str(int(position)),
        "row": str(int(row)),
        "temperature": repr(float(group.temperature)),
        "rewards": json.dumps(group.rewards.tolist()),
        "reward_failed": json.dumps(np.flatnonzero(group.reward_failed).tolist()),
        "trajectory": None if trajectory is None else json.dumps(list(trajectory)),
        "turn_rewards": None if rewards is None else json.dumps([array.tolist() for array in rewards]),
    }


def decode_front(front: bytes, entry: BankEntry) -> tuple[Prompt, list[str]]:
    """Decode the front of a blob, header and prompt ids, to the prompt and every sample's finish reason.

    Raises `ValueError` naming each difference between the header and the index line.
    """
    size = int.from_bytes(front[:8], "little")
    metadata, tensors_match = _read_header(front[8 : 8 + size].rstrip(b" "), entry.shapes)
    finish = metadata.get("finish_reasons", "").split(",")
    stored = metadata | {
        "tensors": tensors_match,
        "truncated": [reason == "length" for reason in finish],
        "finish_reasons": {reason: finish.count(reason) for reason in finish},
    }
    indexed = _indexed_metadata(entry, entry.position, entry.row, entry.trajectory) | {
        "tensors": True,
        "truncated": entry.truncated.tolist(),
        "finish_reasons": entry.finish_reasons,
    }
    if differing := [name for name, value in indexed.items() if stored.get(name) != value]:
        raise ValueError(f"header and index line differ in {', '.join(differing)}")
    if len(front) - 8 - size != 4 * entry.prompt_tokens:
        raise ValueError(f"{len(front) - 8 - size} bytes of prompt ids, expected {4 * entry.prompt_tokens}")
    ids = np.frombuffer(bytearray(front[8 + size :]), np.int32)
    return Prompt(entry.position, entry.row, ids, metadata["text"], metadata["answer"]), finish


def _read_header(header: bytes, shapes: Shapes) -> tuple[dict[str, Any], bool]:
    """Return the metadata, and whether the tensors match `shapes`; parse the tensors only if their text differs."""
    tensors = json.dumps(shapes.table(), separators=(",", ":"))  # as the writer does
    start, end = b'{"__metadata__":', b"," + tensors[1:].encode()
    if header.startswith(start) and header.endswith(end):
        return json.loads(header[len(start) : -len(end)]), True
    fields = json.loads(header)
    return fields.pop("__metadata__", {}), fields == shapes.table()


def decode_sample(entry: BankEntry, i: int, finish_reason: str, parts: dict[str, np.ndarray]) -> Rollout:
    """Decode sample i from `parts`, bytes [uint8] by part name; columns in missing parts are None.

    Raises `ValueError` when the tokens contradict the index line.
    """
    arrays: dict[str, Any] = {}
    for part, tensors in zip(PARTS, entry.shapes.parts(i), strict=True):
        if part not in parts:
            continue
        begin = 0
        for name, dtype, shape in tensors:
            end = begin + tensor_bytes(dtype, shape)
            arrays[name] = parts[part][begin:end].view(DTYPES[dtype]).reshape(shape)
            begin = end
        if begin != len(parts[part]):
            raise ValueError(f"sample {i}, part {part}: {len(parts[part])} bytes, its tensors have {begin}")
    versions = arrays["versions"]
    if len(versions) and (versions.min() < entry.min_version or versions.max() > entry.max_version):
        raise ValueError(
            f"sample {i}: versions {versions.min()} to {versions.max()}, the index line has {entry.min_version} to "
            f"{entry.max_version}"
        )
    return Rollout.from_columns(
        {column.name: arrays[column.stored_name] for column in COLUMNS if column.stored_name in arrays},
        token_ids=arrays["ids"],
        finish_reason=finish_reason,
        spans=_spans(entry, i, arrays["spans"]),
        trajectory=None if entry.trajectory is None else entry.trajectory[i],
    )


def _spans(entry: BankEntry, i: int, spans: np.ndarray) -> np.ndarray | None:
    """Return `Rollout.spans`: None for a single policy span. Raises ValueError if spans contradict the index line."""
    tokens = int(entry.response_lengths[i])
    counts = [tokens, 0, 0] if entry.spans is None else entry.spans[i].tolist()
    if np.bincount(spans[:, 0], weights=spans[:, 1], minlength=3).tolist() != counts:
        raise ValueError(f"sample {i}: spans {spans.tolist()} are not the {counts} tokens by origin of the index line")
    return None if spans.tolist() == [[POLICY, tokens, 0]] else spans
