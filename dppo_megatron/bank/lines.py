"""Write and read bank index lines, each sealed with a crc32."""

from __future__ import annotations

import json
import re
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import from_json

from dppo_megatron.types import RolloutGroup

from .blob import Encoded
from .entry import BankEntry
from .errors import RESTORE, BankCorruption
from .shapes import Shapes

# Every record begins with `kind`, `position` and `row`, so that a scan can skip the rest of the line. In a group's
# line, the blob's offset and size follow.
RECORD = re.compile(rb'\{"kind":"(group|dropped)","position":(\d{1,18}),"row":(\d{1,18})[,}]')
PLACE = re.compile(rb'\{"kind":"group","position":\d{1,18},"row":\d{1,18},"offset":(\d{1,18}),"bytes":(\d{1,18}),')
GROUP_START = b'{"kind":"group",'
BEGIN_START = b'{"kind":"begin",'
END_START = b'{"kind":"end",'
# Fields in a group's line that `BankEntry` has under the same name, unchanged.
_UNCHANGED = ("position", "row", "offset", "prompt_tokens", "min_version", "max_version", "version_sum", "temperature",
              "topk", "time")  # fmt: skip
_SEAL = re.compile(rb',"line":"([0-9a-f]{8})"\}\n?')
_SEAL_BYTES = len(',"line":"00000000"}')


def group_line(group: RolloutGroup, offset: int, encoded: Encoded) -> bytes:
    """Return the index line for a group with a blob at `offset`, newline included."""
    versions = [r.versions for r in group.rollouts if len(r.versions)]
    optional: dict[str, Any] = {}
    if any(r.spans is not None for r in group.rollouts):
        optional["spans"] = [
            [len(r.token_ids), 0, 0]
            if r.spans is None
            else [int(r.spans[r.spans[:, 0] == o, 1].sum()) for o in range(3)]
            for r in group.rollouts
        ]
    if group.rollouts[0].trajectory is not None:
        optional["trajectory"] = [r.trajectory for r in group.rollouts]
    if group.turn_rewards is not None:
        optional["turn_rewards"] = [rewards.tolist() for rewards in group.turn_rewards]
    return sealed(
        kind="group",
        position=int(group.prompt.position),
        row=int(group.prompt.row),
        offset=offset,
        bytes=encoded.size,
        v=2,
        front=encoded.front,
        parts=encoded.parts,
        crc=encoded.crc,
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
        **encoded.shapes.fields(),
        **optional,
        time=round(time.time(), 3),
    )


def dropped_line(position: int, row: int, reason: str, detail: str) -> bytes:
    """Return the index line for a prompt that yields no group."""
    now = round(time.time(), 3)
    return sealed(kind="dropped", position=position, row=row, reason=reason, detail=detail, time=now)


def begin_line(segment: int, chain: int) -> bytes:
    """Return the first line of a segment. chain: running crc32 of all lines in earlier segments."""
    return sealed(kind="begin", v=2, segment=segment, chain=f"{chain:08x}")


def end_line(groups: int, dropped: int, data_size: int) -> bytes:
    """Return the last line of a complete segment."""
    return sealed(kind="end", groups=groups, dropped=dropped, bytes=data_size)


def sealed(**fields: Any) -> bytes:
    """Return the line, with the crc32 of all preceding bytes as the last field."""
    text = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()[:-1]
    return text + b',"line":"%08x"}\n' % zlib.crc32(text)


def is_sealed(line: bytes) -> bool:
    """Return whether the line is unchanged since it was written; the newline may be missing."""
    seal = _SEAL.fullmatch(line, line.rfind(b',"line":"'))
    return seal is not None and int(seal[1], 16) == zlib.crc32(line[: seal.start()])


def starts_with_sealed(tail: bytes) -> bool:
    """Return whether `tail` begins with a complete line, even if the newline is missing or was overwritten."""
    start = tail.rfind(b',"line":"')
    return start >= 0 and len(tail) > start + _SEAL_BYTES and is_sealed(tail[: start + _SEAL_BYTES])


def stored_entry(path: str | Path, line: bytes, number: int, segment: int, line_number: int) -> BankEntry:
    """Parse a group's index line from `path`. Raises `BankCorruption`."""
    try:
        return parse_group_line(line, number, segment, line_number)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise BankCorruption(f"{path}: line {line_number}: not readable ({error}); {RESTORE}") from error


def parse_group_line(line: bytes, number: int, segment: int, line_number: int) -> BankEntry:
    """Parse a group's index line.

    Raises `ValueError`, `KeyError`, `IndexError` or `TypeError` for any other line.
    """
    fields = from_json(line)  # every rank reads every group's line; takes half the time of the standard library
    if fields.get("v") != 2 or not is_sealed(line):
        raise ValueError(f"format {fields.get('v')!r}, or changed since it was written")
    n, routing, parts = fields["n"], fields["routing"], np.array(fields["parts"], dtype=np.int64)
    spans, trajectory, rewards = (fields.get(name) for name in ("spans", "trajectory", "turn_rewards"))

    def samples(indices: list[int]) -> np.ndarray:
        mask = np.zeros(n, dtype=bool)
        mask[indices] = True
        return mask

    return BankEntry(
        number=number,
        segment=segment,
        line=line_number,
        size=fields["bytes"],
        response_lengths=np.array(fields["lengths"], dtype=np.int32),
        rewards=np.array(fields["rewards"], dtype=np.float32),
        reward_failed=samples(fields["failed"]),
        truncated=samples(fields["truncated"]),
        finish_reasons=fields["finish"],
        routing=None if routing is None else (routing[0], routing[1]),
        shapes=Shapes.from_fields(fields, parts[:, 0].tolist()),
        front=tuple(fields["front"]),
        parts=parts,
        part_crc=np.array(fields["crc"], dtype=np.int64),
        spans=None if spans is None else np.array(spans, dtype=np.int32),
        trajectory=None if trajectory is None else tuple(trajectory),
        turn_rewards=None if rewards is None else tuple(np.array(r, dtype=np.float32) for r in rewards),
        **{name: fields[name] for name in _UNCHANGED},
    )
