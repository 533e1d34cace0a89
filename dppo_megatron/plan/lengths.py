"""Lengths of responses that somebody sampled, and what `pace` makes of them for a config, as text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dppo_megatron.bank import BankReader
from dppo_megatron.config import Config
from dppo_megatron.errors import ExpectedError
from dppo_megatron.hf import HFModelConfig

from .pace import Pace, PaceSettings, predict


class LengthsError(ExpectedError, ValueError):
    """The lengths cannot be read; the message names file, line and remedy."""


def read_lengths(path: Path, group_size: int) -> list[np.ndarray]:
    """The lengths of groups: of a bank, of a run's bank, or of a text file with a group's lengths in each line.

    Lines of one length each are put together in groups of `group_size`, in their order; what is left over is left out.
    Raises `LengthsError`, and `BankError` for a damaged bank.
    """
    if path.is_dir():
        reader = BankReader(path / "bank" if (path / "bank").is_dir() else path)
        groups = [np.add.reduceat(e.sampled, e.first_of_trajectories) for e in reader.entries(0, reader.refresh())]
        if not groups:
            raise LengthsError(f"--lengths {path}: no bank with groups in it; name a run, its bank or a text file")
        return groups
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LengthsError(f"--lengths {path}: cannot be read: {error}") from None
    groups = [_numbers(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if all(len(group) == 1 for group in groups):
        flat = np.concatenate([np.empty(0, np.int64), *groups])
        groups = list(flat[: len(flat) - len(flat) % group_size].reshape(-1, group_size))
    if not groups:
        raise LengthsError(f"--lengths {path}: fewer than the {group_size} lengths of a group (rollout.group_size)")
    return groups


def _numbers(path: Path, number: int, line: str) -> np.ndarray:
    try:
        found = np.array([int(word) for word in line.replace(",", " ").split()])
    except ValueError:
        found = np.zeros(1, np.int64)
    if found.min(initial=0 if not len(found) else 1) < 1:
        raise LengthsError(
            f"--lengths {path}: line {number}: {line[:80]!r}: expected tokens of responses, each above 0"
        )
    return found


def pace_settings(
    config: Config, hf: HFModelConfig, *, tokens_per_s: float, train_s: float, store_mb_per_s: float
) -> PaceSettings:
    rollout = config.rollout
    size = 12 + 8 * rollout.topk_logprobs  # ids, log-prob, version; top-K ids and log-probs
    if rollout.routing_replay and hf.moe is not None:
        size += sum(hf.moe.layers) * hf.moe.top_k * (1 if hf.moe.num_experts <= 256 else 2)
    return PaceSettings(
        prompts_per_step=rollout.prompts_per_step,
        concurrent=rollout.max_concurrent_groups,
        max_staleness=rollout.max_staleness,
        steps=min(config.train.steps, 20),
        tokens_per_s=tokens_per_s,
        bytes_per_token=size,
        store_bytes_per_s=store_mb_per_s * 1e6,
        train_s=train_s,
    )


def pace_report(groups: list[np.ndarray], settings: PaceSettings) -> Iterator[str]:
    pace: Pace = predict(groups, settings)
    lengths = np.concatenate(groups)
    yield (
        f"{len(lengths):,} lengths: mean {lengths.mean():,.0f} tokens, median {np.median(lengths):,.0f}, 99 % at most "
        f"{np.quantile(lengths, 0.99):,.0f}, longest {lengths.max():,}"
    )
    share = 100 / max(pace.step_s, 1e-9)
    yield (
        f"a step takes {pace.step_s:.1f} s: waiting for rollouts {pace.wait_s:.1f} s ({share * pace.wait_s:.0f} %), "
        f"training and publishing {pace.train_s:.1f} s ({share * pace.train_s:.0f} %)"
    )
    mean_bytes = float(lengths.sum()) / len(groups) * settings.prompts_per_step * settings.bytes_per_token
    busy = mean_bytes / settings.store_bytes_per_s
    yield f"of it the orchestrator takes {busy:.1f} s to take in, score and store {mean_bytes / 1e6:,.0f} MB"
    yield f"mean staleness {pace.staleness:.2f} policy versions (rollout.max_staleness = {settings.max_staleness})"
