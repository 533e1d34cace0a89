"""Store evaluation answers on disk; stored answers are not sampled again.

SET/v000020.jsonl   one line per prompt: prompt, answer; per sample: text, final answer, reward, length, versions
SET/v000020.json    settings, prompts and policy of the answers and, once all are stored, the metrics
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from dppo_megatron.common.files import DamagedFile, append_json_line, parse_as, read_json, write_atomic, write_json
from dppo_megatron.report.tail import read_records

log = logging.getLogger(__name__)


@dataclass
class _SavedSample:
    text: str
    reward: Annotated[float, Field(allow_inf_nan=False)]
    failed: bool
    tokens: Annotated[int, Field(ge=0)]
    finish: str
    versions: Annotated[list[int], Field(min_length=2, max_length=2)]
    final: str | None = None


@dataclass
class _SavedRecord:
    position: Annotated[int, Field(ge=0)]
    row: int
    prompt: str
    answer: str
    samples: list[_SavedSample]


class SavedAnswers:
    """Stores a policy's answers to one set. Stored answers are used only if their `origin` is equal."""

    def __init__(self, directory: Path, version: int, origin: dict[str, Any], *, prompts: int, n: int):
        """Load the stored answers. The set has `prompts` prompts at positions from 0, with `n` answers each."""
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"v{version:06d}.jsonl"
        self._head = self.path.with_suffix(".json")
        self._origin = json.loads(json.dumps(origin))
        self.records: dict[int, dict[str, Any]] = {}  # by position
        if self._stored_origin() == self._origin:
            for record in read_records(self.path):
                if not _is_whole(record, prompts, n):
                    log.warning("%s: a damaged record; its prompt is answered again", self.path)
                # Answers during which the policy changed are sampled again.
                elif all(sample["versions"] == [version, version] for sample in record["samples"]):
                    self.records[record["position"]] = record
        write_atomic(self.path, "".join(json.dumps(record) + "\n" for record in self.records.values()))
        write_json(self._head, {"of": self._origin})

    def add(self, record: dict[str, Any]) -> None:
        append_json_line(self.path, record)
        self.records[record["position"]] = record

    def _stored_origin(self) -> Any:
        try:
            return (read_json(self._head) or {}).get("of")
        except ValueError:  # a damaged file; its answers are not used
            return None

    def finish(self, metrics: dict[str, Any]) -> None:
        write_json(self._head, {"of": self._origin, "metrics": metrics}, indent=1)


def _is_whole(record: dict[str, Any], prompts: int, n: int) -> bool:
    try:
        saved_record = parse_as(_SavedRecord, json.dumps(record).encode(), "a record")
    except DamagedFile:
        return False
    return saved_record.position < prompts and len(saved_record.samples) == n
