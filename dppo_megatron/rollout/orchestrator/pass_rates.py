"""Measure how many answers to each prompt in a bank are right, and select prompts by this share."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dppo_megatron.bank import BankReader
from dppo_megatron.common.files import output, write_atomic
from dppo_megatron.config import Config, read_config
from dppo_megatron.data.prompts import PromptFile
from dppo_megatron.data.tokenizer import load_tokenizer
from dppo_megatron.errors import ExpectedError
from dppo_megatron.rollout.environments.pool import EnvironmentPool
from dppo_megatron.types import Prompt


class PassRateError(ExpectedError, ValueError):
    """The bank has no pass rates, or other prompts than the file."""


@dataclass(slots=True)
class Measured:
    """Counts the answers to one row of the prompt file."""

    prompt: Prompt
    right: int = 0
    graded: int = 0


def measure(bank: Path, pass_reward: float = 1.0) -> str:
    """Return a line about a bank: how many prompts and graded answers it has, and how many answers are right."""
    tallies = _pass_rates(bank, pass_reward).values()
    graded, right = sum(t.graded for t in tallies), sum(t.right for t in tallies)
    always, never = sum(t.graded == t.right > 0 for t in tallies), sum(t.graded > 0 == t.right for t in tallies)
    share = f"{right / graded:.1%} right" if graded else "none right"
    share += f" (reward of at least {pass_reward:g})"
    return f"{len(tallies)} prompts, {graded} graded answers, {share}; {always} prompts always solved, {never} never"


def keep(bank: Path, out: Path, lowest: float, highest: float, pass_reward: float = 1.0) -> str:
    """Write the data.train rows with a pass rate in [lowest, highest], and report how many rows were kept or left out.

    Rows keep their columns and get `pass_rate` and `pass_answers` (number of graded answers).
    Reads the run config next to the bank. Raises `PassRateError`, also if a row differs from the sampled prompt.
    """
    if not 0 <= lowest <= highest <= 1:
        raise PassRateError(f"--pass-rate {lowest:g}:{highest:g}: must be FROM:TO with 0 <= FROM <= TO <= 1")
    if out.exists():
        raise PassRateError(f"{out}: exists; name another file, or remove it")
    config_path = bank.absolute().parent / "config.yaml"
    if not config_path.exists():
        raise PassRateError(
            f"--bank = {bank}: {config_path} is missing; name RUN/bank, in the directory of the run that filled it"
        )
    config = read_config(config_path)
    if config.data.more:
        raise PassRateError("data.more: rows of several files cannot be distinguished by their number; sample one file")
    tallies = _pass_rates(bank, pass_reward)
    file = _prompts(config)
    lines, counts = [], Counter[str]()
    for row in file.rows:
        tally = tallies.pop(row.number - 1, None)
        if tally is None:
            counts["not sampled"] += 1
            continue
        if (row.text, row.answer) != (tally.prompt.text, tally.prompt.answer):
            raise PassRateError(f"{file.path}: row {row.number} is not the prompt that was sampled; restore the file")
        rate = tally.right / tally.graded if tally.graded else None
        if rate is None:
            counts["without a graded answer"] += 1
        elif rate < lowest:
            counts[f"with a pass rate below {lowest:g}"] += 1
        elif rate > highest:
            counts[f"with a pass rate above {highest:g}"] += 1
        else:
            columns = {**row.columns, "pass_rate": rate, "pass_answers": tally.graded}
            lines.append(json.dumps(columns, ensure_ascii=False, default=str) + "\n")
    counts["not sampled"] += file.total - len(file.rows)  # dropped, because they are too long
    if tallies:
        raise PassRateError(f"{config.data.train}: has no row {min(tallies) + 1}, which the bank has; restore the file")
    report = [f"{out}: {len(lines)} of {len(lines) + counts.total()} prompts"]
    report += [f"  left out: {count} {reason}" for reason, count in counts.most_common() if count]
    if not lines:
        raise PassRateError("\n".join([f"{bank}: no prompt is left", *report[1:]]))
    write_atomic(output(out, "OUT"), "".join(lines))
    return "\n".join(report)


def _prompts(config: Config) -> PromptFile:
    """Read the prompts as they were sampled: a chat template adds the environment's tools."""
    tools: list[dict[str, Any]] = []
    if config.environment.name is not None:
        with EnvironmentPool(config.environment) as environments:
            tools = asyncio.run(environments.tools())
    return PromptFile(config.data.train, load_tokenizer(config.model.path), config.data, tools)


def _pass_rates(bank: Path, pass_reward: float) -> dict[int, Measured]:
    """Count answers by prompt file row, from 0. If a prompt was sampled again, all answers count."""
    reader = BankReader(bank)
    tallies: dict[int, Measured] = {}
    for entry in reader.entries(0, reader.refresh()):
        if entry.row not in tallies:
            tallies[entry.row] = Measured(reader.read(entry, [], ()).prompt)
        first_rows = entry.first_of_trajectories
        graded = ~entry.reward_failed[first_rows]
        tallies[entry.row].graded += int(graded.sum())
        tallies[entry.row].right += int((graded & (entry.rewards[first_rows] >= np.float32(pass_reward - 1e-6))).sum())
    if not tallies:
        raise PassRateError(f"{bank}: has no group; name a bank that `sample` or a run filled")
    return tallies
