"""Predicts step time and token staleness from response lengths, by simulating the run.

The simulation follows the orchestrator's rules for starting and storing groups (`orchestrator.staleness`). It models
engines as a number of groups that are sampled at once, and the orchestrator as one worker that handles all bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np

from dppo_megatron.bank import BankReader
from dppo_megatron.config import Config
from dppo_megatron.errors import ExpectedError
from dppo_megatron.hf import HFModelConfig
from dppo_megatron.rollout.orchestrator.staleness import StalenessBound

REPEATS = 8  # draws of lengths; the prediction is the mean
_SAMPLED, _SCORED, _PUBLISHED = range(3)


class LengthsError(ExpectedError, ValueError):
    """Raised for lengths that cannot be read; the message names the file, the line and the remedy."""


@dataclass(frozen=True, slots=True)
class PaceSettings:
    """Describes a run's speeds and sizes. A trainer step takes `train_s`, regardless of response lengths."""

    prompts_per_step: int
    concurrent: int  # groups sampled at once
    max_staleness: int
    steps: int
    tokens_per_s: float  # sampling speed per response
    bytes_per_token: float  # size of a response token in a reply and in the bank
    store_bytes_per_s: float  # bytes that the orchestrator receives, scores and stores
    train_s: float


@dataclass(frozen=True, slots=True)
class Pace:
    """Contains predicted step seconds and staleness, as means over a run's steps and over several draws."""

    wait_s: float  # waiting for rollouts
    train_s: float  # reading, training and publishing
    staleness: float  # policy versions, over all sampled tokens

    @property
    def step_s(self) -> float:
        return self.wait_s + self.train_s


def read_lengths(path: Path, group_size: int) -> list[np.ndarray]:
    """Return response lengths by group from a bank, a run's bank, or a text file with a group in each line.

    If every line has a single length, each `group_size` lines in order form a group. An incomplete last group is
    dropped. Raises `LengthsError`, and `BankError` for a damaged bank.
    """
    if path.is_dir():
        reader = BankReader(path / "bank" if (path / "bank").is_dir() else path)
        groups = [np.add.reduceat(e.sampled, e.first_of_trajectories) for e in reader.entries(0, reader.refresh())]
        if not groups:
            raise LengthsError(f"--lengths {path}: no bank with groups; name a run, its bank or a text file")
        return groups
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LengthsError(f"--lengths {path}: cannot be read: {error}") from None
    groups = []
    for number, line in enumerate(lines, 1):
        words = line.replace(",", " ").split()
        if not all(word.isdecimal() and int(word) for word in words) or (line.strip() and not words):
            raise LengthsError(
                f"--lengths {path}: line {number}: {line[:80]!r}: expected tokens of responses, each above 0"
            )
        groups += [np.array([int(word) for word in words])] if words else []
    if all(len(group) == 1 for group in groups):
        flat = np.concatenate([np.empty(0, np.int64), *groups])
        groups = list(flat[: len(flat) - len(flat) % group_size].reshape(-1, group_size))
    if not groups:
        raise LengthsError(f"--lengths {path}: fewer than the {group_size} lengths of a group (rollout.group_size)")
    return groups


def pace_settings(
    config: Config, hf: HFModelConfig, *, tokens_per_s: float, train_s: float, store_mb_per_s: float
) -> PaceSettings:
    """Return the pace settings for a run of `config`, for at most the first 20 steps."""
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
    """Yield the lines that `plan --lengths` prints."""
    pace, lengths = predict(groups, settings), np.concatenate(groups)
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
    yield f"the orchestrator needs {busy:.1f} s of it to receive, score and store {mean_bytes / 1e6:,.0f} MB"
    yield f"mean staleness {pace.staleness:.2f} policy versions (rollout.max_staleness = {settings.max_staleness})"


def predict(groups: Sequence[np.ndarray], settings: PaceSettings) -> Pace:
    """Simulate a run with lengths drawn with replacement from `groups`.

    If there are exactly as many groups as the run needs, each group is used once, in order.
    """
    num_groups = settings.steps * settings.prompts_per_step
    rng = np.random.default_rng(0)
    draws = [[groups[i] for i in rng.integers(0, len(groups), num_groups)] for _ in range(REPEATS)]
    if len(groups) == num_groups:
        draws = [list(groups)]
    waits, lags = zip(*(_play(draw, settings) for draw in draws), strict=True)
    return Pace(mean(waits), settings.train_s, mean(lags))


def _play(groups: list[np.ndarray], s: PaceSettings) -> tuple[float, float]:
    """Return (seconds per step in which the trainer waits, mean token staleness)."""
    bound = StalenessBound(s.prompts_per_step, s.max_staleness)
    tokens = [float(lengths.sum()) for lengths in groups]
    now = waited = 0.0
    busy_until = 0.0  # the orchestrator
    lag = 0.0  # versions, summed over all stored tokens
    started = stored = 0  # groups
    trained = 0  # steps that the trainer began
    events: list[tuple[float, int, int]] = []  # time, kind, group
    published = [0.0]  # time of each version
    running: dict[int, tuple[int, int, float]] = {}  # groups that are sampled or scored: (last step, group, start)
    finished: list[tuple[int, int, float]] = []  # groups that wait for slower ones, as a heap
    while True:
        version = len(published) - 1
        while len(running) < s.concurrent and started < len(groups) and version >= bound.needed_version(started):
            running[started] = bound.last_step(version), started, now
            heapq.heappush(events, (now + float(groups[started].max()) / s.tokens_per_s, _SAMPLED, started))
            started += 1
        if not events:
            return waited / s.steps, lag / sum(tokens)
        now, kind, group = heapq.heappop(events)
        if kind == _SAMPLED:
            busy_until = max(busy_until, now) + tokens[group] * s.bytes_per_token / s.store_bytes_per_s
            heapq.heappush(events, (busy_until, _SCORED, group))
        elif kind == _PUBLISHED:
            published.append(now)
        else:
            heapq.heappush(finished, running.pop(group))
            while finished and bound.leaves_room(stored, [last for last, *_ in (*finished[1:], *running.values())]):
                _, group, start = heapq.heappop(finished)
                offsets = [max(at - start, 0.0) * s.tokens_per_s for at in published[1:]]  # tokens before each update
                # Each update during sampling makes the group's later tokens one version newer.
                newer = sum(np.maximum(groups[group] - offset, 0).sum() for offset in offsets)
                lag += stored // s.prompts_per_step * tokens[group] - newer
                stored += 1
        if trained == len(published) - 1 and stored >= (trained + 1) * s.prompts_per_step:
            waited += now - published[-1]
            trained += 1
            heapq.heappush(events, (now + s.train_s, _PUBLISHED, 0))
