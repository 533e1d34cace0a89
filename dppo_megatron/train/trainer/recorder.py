"""Log the run on rank 0: the records of trainer and orchestrator."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from dppo_megatron.common.heartbeat import in_phase
from dppo_megatron.common.progress import last_progress
from dppo_megatron.config import Config
from dppo_megatron.report.masked_tokens import MaskedTokenLog
from dppo_megatron.report.names import evaluated_sets, is_step_record
from dppo_megatron.report.tail import JsonlFollower, has_evaluation, metrics_of, read_metrics, step_of
from dppo_megatron.report.trackers import Trackers, build_trackers
from dppo_megatron.run_dir import RunDir

log = logging.getLogger(__name__)

POLL_S = 0.02


class RankZeroRecorder:
    """Forwards metrics to the trackers on rank 0, and does nothing on other ranks. Use it as a context manager.

    Only one process writes to the trackers. This class therefore reads the orchestrator's measurements (sampling speed,
    evaluations) from a file and logs them under their step, possibly late.
    """

    def __init__(self, config: Config, rank: int, resume_step: int | None, decode: Callable[[int], str]):
        """Open the trackers on rank 0. decode: token id -> text, for the masked-token log."""
        self._config = config
        self._trackers = build_trackers(config, resume_step) if rank == 0 else None
        self._masked = MaskedTokenLog(config.run.dir, decode, resume_step) if rank == 0 else None
        self._first_step = resume_step or 0
        run = RunDir(config.run.dir)
        self._follower = JsonlFollower(run.rollout_metrics, self._evaluations_and_later)
        earlier = read_metrics(run.metrics, self._evaluations_and_later) if rank == 0 else []
        self._recorded = {record["step"] for record in earlier if is_step_record(record)}
        self._evaluated = {(record["step"], name) for record in earlier for name in evaluated_sets(record)}

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if self._trackers is None:
            return
        self._forward(self._trackers)
        self._trackers.log(step, metrics)

    def log_missing(self, step: int | None, metrics: Mapping[str, Any]) -> None:
        """Log `metrics` from a checkpoint if `step` has no record, because the run was killed between the two."""
        if self._trackers is None or step is None or step in self._recorded:
            return
        for record in metrics_of([{**metrics, "step": step}]):
            if is_step_record(record):
                del record["step"]
                self._trackers.log(step, {name: math.nan if x is None else x for name, x in record.items()})

    def log_masked(self, step: int, counts: Mapping[int, int]) -> None:
        """Log the masked tokens of a step. counts: token id -> how often the step masked it."""
        if self._masked is not None:
            self._masked.log(step, counts)

    @in_phase("wait")
    def wait_for_last_evaluation(self) -> None:
        """Wait until the orchestrator evaluated the last policy, if it evaluates at all."""
        if self._trackers is None or not self._config.samples:
            return
        expected = {(self._config.train.steps, name) for name in self._config.eval_sets}
        last, changed_at = "", time.monotonic()
        while not expected <= self._evaluated:
            if (progress := last_progress(self._follower.path)) != last:
                last, changed_at = progress, time.monotonic()
            if time.monotonic() - changed_at > self._config.run.stall_timeout_s:
                log.warning(
                    "the last evaluation made no progress for %.0f s (run.stall_timeout_s), %s; see the orchestrator's "
                    "log", self._config.run.stall_timeout_s, last,
                )  # fmt: skip
                return
            self._forward(self._trackers)
            time.sleep(POLL_S)

    def _evaluations_and_later(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        return (line for line in lines if has_evaluation(line) or step_of(line) >= self._first_step)

    def _forward(self, trackers: Trackers) -> None:
        for record in self._follower.poll()[0]:
            step = record.pop("step")
            evaluated = {(step, name) for name in evaluated_sets(record)}
            new = not evaluated <= self._evaluated if evaluated else step > self._first_step
            if new:  # an earlier attempt logged the others
                trackers.log(step, record)
            self._evaluated |= evaluated

    def __enter__(self) -> RankZeroRecorder:
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._trackers is not None:
            self._trackers.close()
        if self._masked is not None:
            self._masked.close()
