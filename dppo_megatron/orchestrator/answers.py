"""The answers of an evaluation on disk: what is there is not sampled again.

SET/v000020.jsonl   a line a prompt: prompt, answer, and of each sample text, final answer, reward, length, versions
SET/v000020.json    what they are of (settings, prompts, policy) and, once all are there, what they add up to
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dppo_megatron.common.files import read_json, write_atomic, write_json
from dppo_megatron.observability.tail import read_records


class Answers:
    """Those of one set under one policy. `of`: whatever must be equal for the answers that are there to count."""

    def __init__(self, directory: Path, version: int, of: dict[str, Any]):
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"v{version:06d}.jsonl"
        self._head = self.path.with_suffix(".json")
        self._of = json.loads(json.dumps(of))
        self.records: dict[int, dict[str, Any]] = {}  # by position
        if self._found() == self._of:
            for record in read_records(self.path):
                # What was answered while the next policy came is answered again: that may be another one this time.
                if all(sample["versions"] == [version, version] for sample in record["samples"]):
                    self.records[record["position"]] = record
        write_atomic(self.path, "".join(map(_line, self.records.values())))
        write_json(self._head, {"of": self._of})

    def add(self, record: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(_line(record))
        self.records[record["position"]] = record

    def _found(self) -> Any:
        try:
            return (read_json(self._head) or {}).get("of")
        except ValueError:  # a damaged file: what it stands beside counts for nothing
            return None

    def finish(self, metrics: dict[str, Any]) -> None:
        write_json(self._head, {"of": self._of, "metrics": metrics}, indent=1)


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record) + "\n"
