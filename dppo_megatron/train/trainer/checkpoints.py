"""Save and load checkpoints, and decide when a checkpoint is due."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from dppo_megatron.bank import allow_deletion
from dppo_megatron.config import Config
from dppo_megatron.errors import ExpectedError
from dppo_megatron.run_dir import RunDir
from dppo_megatron.train.actor import Actor
from dppo_megatron.train.actor.checkpoint.directory import kept_steps

log = logging.getLogger(__name__)


class CheckpointMismatch(ExpectedError, ValueError):
    """The checkpoint was made with a setting that differs in the resuming run."""


class Checkpoints:
    """Saves weights, optimizer, schedule and RNG with the number of finished steps.

    That number is the policy version and, times the groups per step, the bank cursor. The bank has the rollouts for all
    later steps, so nothing else is needed to resume exactly. Use the class as a context manager around the steps.
    """

    def __init__(self, config: Config, actor: Actor):
        self._config = config
        self._actor = actor
        self._directory = RunDir(config.run.dir).checkpoints
        self._saved: int | None = None
        self.metrics: dict[str, Any] = {}  # metrics for the step that `load_latest` restored

    def due(self, step: int) -> bool:
        interval = self._config.checkpoint.every
        if step == self._config.train.steps:
            return self._config.checkpoint.final
        return interval > 0 and step % interval == 0

    def save(self, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Save the state after `step`. metrics: the step's record, in case the run is killed before logging it."""
        if step == self._saved:
            return
        state = {
            "step": step,
            "groups_consumed": step * self._config.rollout.prompts_per_step,
            "metrics": {name: x if math.isfinite(x) else None for name, x in (metrics or {}).items()},
        }
        self._actor.save_checkpoint(self._directory, step, state, keep=self._config.checkpoint.keep)
        self._saved = step
        self._release_rollouts()

    def _release_rollouts(self) -> None:
        """Permit deleting rollouts that no checkpoint on disk needs. A checkpoint being written counts later."""
        keep = self._config.checkpoint.keep_rollouts
        if keep is None or self._actor.layout.rank != 0:
            return
        try:
            if steps := kept_steps(self._directory):
                # A bank segment contains the rollouts for one step.
                allow_deletion(RunDir(self._config.run.dir).bank, min(steps[0], steps[-1] - keep))
        except OSError as error:
            log.warning("checkpoint.keep_rollouts = %d: no rollouts are deleted for now: %s", keep, error)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exc: object) -> None:
        """Wait for the last checkpoint if it is written in the background, and raise any write error.

        After a training error, the other ranks may be at any point. Each rank then waits only for the files that it
        writes, and the training error is raised.
        """
        if kind is None:
            self._actor.finish_checkpoint()
            self._release_rollouts()
        else:
            self._actor.settle_checkpoint()

    def load_latest(self) -> int | None:
        """Restore the newest complete checkpoint and return the step; None if there is no checkpoint."""
        state = self._actor.load_checkpoint(self._directory)
        if state is None:
            return None
        expected = state["step"] * self._config.rollout.prompts_per_step
        if state["groups_consumed"] != expected:
            raise CheckpointMismatch(
                f"rollout.prompts_per_step = {self._config.rollout.prompts_per_step}: the checkpoint consumed "
                f"{state['groups_consumed']} groups in {state['step']} steps; use the setting it was made with"
            )
        self._saved, self.metrics = state["step"], state.get("metrics", {})
        return state["step"]
