"""The table: a row for each sample of the bank, from its index alone, and one for each answer of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dppo_megatron.bank import BankEntry
from dppo_megatron.common.files import read_regular
from dppo_megatron.config import Config
from dppo_megatron.objectives import group_advantages
from dppo_megatron.observability.tail import parse_lines, records_as
from dppo_megatron.run_dir import RunDir
from dppo_megatron.trainer.step_samples import StepSamples

from .source import Source

ANSWER_BYTES = 16 << 20  # of the files of all evaluations; of larger ones every n-th prompt is shown
_MOST_BYTES = 4 << 30

# Of a row: `set` 0 for training, else the number of the evaluation's set; `source` the group, or the file of answers;
# `item` the prompt in that file. `step` is counted from 1; of an evaluation it is the policy's version. `prompt` is the
# place in the prompt order, `row` the line of the prompt file (of an evaluation its position).
COLUMNS: dict[str, type[np.generic]] = {
    "set": np.uint8,
    "source": np.int32,
    "item": np.int32,
    "sample": np.int32,
    "step": np.int32,
    "prompt": np.int32,
    "row": np.int32,
    "reward": np.float32,
    "advantage": np.float32,
    "tokens": np.int32,
    "truncated": np.uint8,
    "failed": np.uint8,
    "version": np.int32,
    "staleness": np.float32,
}
Columns = dict[str, np.ndarray]


@dataclass
class Training:
    """The rows of the bank and the groups that they are of."""

    columns: Columns
    entries: list[BankEntry]


@dataclass
class Answers:
    """The rows of evaluations; `files` hold the records, `sets` the names."""

    columns: Columns
    sets: list[str] = field(default_factory=list)
    files: list[list[dict[str, Any]]] = field(default_factory=list)


def training_rows(source: Source, config: Config | None) -> Training:
    blocks, entries = [], []
    for step, of_step in source.groups_of_steps():
        for entry, advantages in zip(of_step, _advantages(of_step, config), strict=True):
            blocks.append(_rows_of_group(len(entries), step, entry, advantages, source.is_run))
            entries.append(entry)
    return Training(_joined(blocks), entries)


def _rows_of_group(number: int, step: int, entry: BankEntry, advantages: np.ndarray, is_run: bool) -> dict[str, Any]:
    count = entry.num_samples
    return {
        "set": np.zeros(count),
        "source": np.full(count, number),
        "item": np.zeros(count),
        "sample": np.arange(count),
        "step": np.full(count, step),
        "prompt": np.full(count, entry.position),
        "row": np.full(count, entry.row),
        "reward": np.where(entry.reward_failed, np.nan, entry.rewards),
        "advantage": advantages,
        "tokens": entry.sampled,
        "truncated": entry.truncated,
        "failed": entry.reward_failed,
        "version": np.full(count, entry.min_version),
        # The batch of step s is trained by the weights of version s - 1, or newer ones.
        "staleness": np.full(count, step - 1 - entry.min_version if is_run else np.nan),
    }


def _advantages(entries: list[BankEntry], config: Config | None) -> list[np.ndarray]:
    """Of every sample of every group of a step, as the trainer computes them; by turns: of the first one."""
    if config is not None and len(entries) == config.rollout.prompts_per_step:
        try:
            found = list(StepSamples.of(entries, config).advantages[:, :, 0])
        except ValueError:  # groups of several sizes, which the trainer refuses
            found = [np.full(entry.num_samples, np.nan) for entry in entries]
    elif config is not None and config.objective.advantage.startswith("batch"):
        found = [np.full(entry.num_samples, np.nan) for entry in entries]  # there is no batch yet
    else:
        found = [_of_group(entry, config) for entry in entries]
    return [of[entry.trajectories] for of, entry in zip(found, entries, strict=True)]


def _of_group(entry: BankEntry, config: Config | None) -> np.ndarray:
    if config is not None:
        return StepSamples.of([entry], config).advantages[0, :, 0]
    first = entry.first_of_trajectories
    rewards = torch.from_numpy(entry.rewards[first])[None]
    return group_advantages(rewards, valid=torch.from_numpy(~entry.reward_failed[first])[None])[0].numpy()


@dataclass
class _Sample:
    text: str
    reward: float
    failed: bool
    tokens: int
    finish: str
    versions: list[int]
    final: Any = None


@dataclass
class _Answered:
    position: int
    prompt: str
    answer: str
    samples: list[_Sample]


def answer_rows(source: Source) -> Answers:
    """Evaluations are files `answers/SET/vNNNNNN.jsonl`; a line that is no answer is left out."""
    paths = sorted(RunDir(source.root).answers.glob("*/v*.jsonl")) if source.is_run else []
    paths = [path for path in paths if path.stem[1:].isdecimal()]
    stride = -(-sum(path.stat().st_size for path in paths) // ANSWER_BYTES) or 1
    if stride > 1:
        source.notes.append(f"Of the answers of evaluations every {stride}th prompt is shown.")
    found = Answers({}, sorted({path.parent.name for path in paths}))
    blocks = []
    for path in paths:
        try:
            lines = read_regular(path, _MOST_BYTES).splitlines()
        except (OSError, ValueError) as error:
            source.notes.append(f"{path}: not read: {error}")
            continue
        records = records_as(_Answered, parse_lines(b"\n".join(lines[::stride])))
        if missing := len(lines[::stride]) - len(records):
            source.notes.append(f"{path}: {missing} lines are no answers")
        blocks.append(_rows_of_answers(len(found.files), found.sets.index(path.parent.name) + 1, path, records))
        found.files.append([_shown(record) for record in records])
    found.columns = _joined(blocks)
    return found


def _rows_of_answers(number: int, of_set: int, path: Path, records: list[_Answered]) -> dict[str, Any]:
    samples = [(item, i, r.position, s) for item, r in enumerate(records) for i, s in enumerate(r.samples)]
    count, version = len(samples), int(path.stem[1:])
    return {
        "set": np.full(count, of_set),
        "source": np.full(count, number),
        "item": [item for item, _, _, _ in samples],
        "sample": [i for _, i, _, _ in samples],
        "step": np.full(count, version),
        "prompt": [position for _, _, position, _ in samples],
        "row": [position for _, _, position, _ in samples],
        "reward": [np.nan if s.failed else s.reward for *_, s in samples],
        "advantage": np.full(count, np.nan),
        "tokens": [s.tokens for *_, s in samples],
        "truncated": [s.finish == "length" for *_, s in samples],
        "failed": [s.failed for *_, s in samples],
        "version": np.full(count, version),
        "staleness": np.full(count, np.nan),
    }


def _shown(record: _Answered) -> dict[str, Any]:
    samples = [{"text": s.text, "final": s.final, "finish": s.finish} for s in record.samples]
    return {"prompt": record.prompt, "answer": record.answer, "samples": samples}


def _joined(blocks: list[dict[str, Any]]) -> Columns:
    return {
        name: np.concatenate([np.asarray(block[name], kind) for block in blocks]) if blocks else np.zeros(0, kind)
        for name, kind in COLUMNS.items()
    }
