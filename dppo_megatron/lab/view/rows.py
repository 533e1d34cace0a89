"""Builds the table: a row for each sample in the bank index, and for each evaluation answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dppo_megatron.bank import BankEntry
from dppo_megatron.common.files import read_regular
from dppo_megatron.config import Config
from dppo_megatron.objectives import group_advantages
from dppo_megatron.report.tail import parse_lines, records_as
from dppo_megatron.run_dir import RunDir
from dppo_megatron.train.trainer.step_samples import StepSamples

from .source import Source

ANSWER_BYTES = 16 << 20  # limit for all evaluation files, beyond which every n-th prompt is shown
_MAX_BYTES = 4 << 30

# set: 0 for training, else the evaluation set number
# source: group or answer file number; item: prompt number in the answer file
# step: from 1; for evaluations, the policy version
# prompt: index in the prompt order
# row: prompt file line; for evaluations, equals `prompt`
ROW = np.dtype(
    [(name, np.uint8) for name in ("set", "truncated", "failed")]
    + [(name, np.int32) for name in ("source", "item", "sample", "step", "prompt", "row", "tokens", "version")]
    + [(name, np.float32) for name in ("reward", "advantage", "staleness")]
)


@dataclass
class AnswerRows:
    """Contains evaluation rows, evaluation set names, and the records of each answer file."""

    rows: np.ndarray  # dtype ROW
    sets: list[str] = field(default_factory=list)
    files: list[list[dict[str, Any]]] = field(default_factory=list)


def training_rows(source: Source, config: Config | None) -> tuple[np.ndarray, list[BankEntry]]:
    """Return the bank's (rows [N] of dtype ROW, groups)."""
    blocks: list[np.ndarray] = []
    entries: list[BankEntry] = []
    for step, step_entries in source.groups_of_steps():
        for entry, advantages in zip(step_entries, _advantages(step_entries, config), strict=True):
            rows = np.zeros(entry.num_samples, ROW)
            rows["source"], rows["sample"] = len(entries), np.arange(entry.num_samples)
            rows["step"], rows["prompt"], rows["row"] = step, entry.position, entry.row
            rows["reward"] = np.where(entry.reward_failed, np.nan, entry.rewards)
            rows["advantage"], rows["tokens"] = advantages, entry.sampled
            rows["truncated"], rows["failed"] = entry.truncated, entry.reward_failed
            rows["version"] = entry.min_version
            # Step s trains weights of version s - 1 or newer.
            rows["staleness"] = step - 1 - entry.min_version if source.is_run else np.nan
            blocks.append(rows)
            entries.append(entry)
    return np.concatenate([np.zeros(0, ROW), *blocks]), entries


def _advantages(entries: list[BankEntry], config: Config | None) -> list[np.ndarray]:
    """Return the trainer's advantage of every sample in a step. With advantages by turn, return the first turn's."""
    if config is not None and len(entries) == config.rollout.prompts_per_step:
        try:
            advantages = list(StepSamples.from_entries(entries, config).advantages[:, :, 0])
        except ValueError:  # groups of several sizes, which the trainer rejects
            advantages = [np.full(entry.num_samples, np.nan) for entry in entries]
    elif config is not None and config.objective.advantage.startswith("batch"):
        advantages = [np.full(entry.num_samples, np.nan) for entry in entries]  # there is no batch yet
    else:
        advantages = [_group_advantages(entry, config) for entry in entries]
    return [by_trajectory[entry.trajectories] for by_trajectory, entry in zip(advantages, entries, strict=True)]


def _group_advantages(entry: BankEntry, config: Config | None) -> np.ndarray:
    if config is not None:
        return StepSamples.from_entries([entry], config).advantages[0, :, 0]
    first = entry.first_of_trajectories
    rewards = torch.from_numpy(entry.rewards[first])[None]
    return group_advantages(rewards, valid=torch.from_numpy(~entry.reward_failed[first])[None])[0].numpy()


@dataclass
class _AnsweredSample:
    text: str
    reward: float
    failed: bool
    tokens: int
    finish: str
    versions: list[int]
    final: Any = None


@dataclass
class _AnsweredPrompt:
    position: int
    prompt: str
    answer: str
    samples: list[_AnsweredSample]


def answer_rows(source: Source) -> AnswerRows:
    """Read a run's `answers/SET/vNNNNNN.jsonl` files, and skip lines that are not answers."""
    paths = sorted(RunDir(source.root).answers.glob("*/v*.jsonl")) if source.is_run else []
    paths = [path for path in paths if path.stem[1:].isdecimal()]
    stride = -(-sum(path.stat().st_size for path in paths) // ANSWER_BYTES) or 1
    if stride > 1:
        source.notes.append(f"The page shows every {stride}th prompt of the evaluations.")
    answers = AnswerRows(np.zeros(0, ROW), sorted({path.parent.name for path in paths}))
    blocks = []
    for path in paths:
        try:
            lines = read_regular(path, _MAX_BYTES).splitlines()
        except (OSError, ValueError) as error:
            source.notes.append(f"{path}: not read: {error}")
            continue
        records = records_as(_AnsweredPrompt, parse_lines(lines[::stride]))
        if missing := len(lines[::stride]) - len(records):
            source.notes.append(f"{path}: {missing} lines are not answers")
        samples = [(item, i, r.position, s) for item, r in enumerate(records) for i, s in enumerate(r.samples)]
        rows = np.zeros(len(samples), ROW)
        rows["set"], rows["source"] = answers.sets.index(path.parent.name) + 1, len(answers.files)
        rows["step"] = rows["version"] = int(path.stem[1:])
        rows["advantage"] = rows["staleness"] = np.nan
        for row, (item, i, position, s) in zip(rows, samples, strict=True):
            row["item"], row["sample"], row["prompt"], row["row"] = item, i, position, position
            row["reward"], row["tokens"] = np.nan if s.failed else s.reward, s.tokens
            row["truncated"], row["failed"] = s.finish == "length", s.failed
        blocks.append(rows)
        answers.files.append([_shown(record) for record in records])
    answers.rows = np.concatenate([answers.rows, *blocks])
    return answers


def _shown(record: _AnsweredPrompt) -> dict[str, Any]:
    samples = [{"text": s.text, "final": s.final, "finish": s.finish} for s in record.samples]
    return {"prompt": record.prompt, "answer": record.answer, "samples": samples}
