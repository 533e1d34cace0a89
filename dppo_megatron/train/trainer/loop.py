"""Run the training loop. A step waits, reads, updates, publishes and saves; n is rollout.max_staleness.

    every trainer rank                     orchestrator and engines
    publish 0 ---------------------------> verify the weights, then sample the groups of steps 0 to n
    wait     <---------------------------- the bank has all groups of step s
             ----------------------------> an engine that restarted gets a broadcast policy again
    read     rollouts; old and reference log-probs
    update   train.updates_per_step times
    publish s + 1 -----------------------> verify the weights, then begin the groups of step s + 1 + n
    save     if a checkpoint is due        sample

A wait ends after run.stall_timeout_s without any progress, a publish after engine.unavailable_timeout_s without an
engine, and each collective after parallel.timeout_s. Colocated engines and the actor use the GPUs in turn: `publish`
offloads the actor, so the checkpoint is saved before the publish.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from dppo_megatron.common.heartbeat import moved
from dppo_megatron.config import Config
from dppo_megatron.objectives import ObjectiveProtocol
from dppo_megatron.report.profiling import StepProfiler, phase
from dppo_megatron.run_dir import RunDir
from dppo_megatron.train.actor import Actor
from dppo_megatron.train.weight_sync import Publisher, WeightSyncError

from .acceptance import Acceptance
from .batches import BatchSource, StepBatch
from .checkpoints import Checkpoints
from .control import Control, StopRequested
from .metrics import MismatchHistory, StepMetrics, Throughput
from .policy_logprobs import PolicyLogprobs, with_batch_statistic
from .recorder import RankZeroRecorder
from .token_log import TokenLog

log = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class Training:
    """Trains one rank's part of the policy. `publisher` is None without engines (supervised training)."""

    config: Config
    actor: Actor
    objective: ObjectiveProtocol
    source: BatchSource
    policy_logprobs: PolicyLogprobs
    acceptance: Acceptance
    publisher: Publisher | None
    checkpoints: Checkpoints
    control: Control
    recorder: RankZeroRecorder
    token_log: TokenLog
    step: int  # number of finished steps

    def __post_init__(self) -> None:
        self._profiler = StepProfiler(self.config.profile, RunDir(self.config.run.dir).profile, self.actor.layout.rank)
        self._mismatches, self._throughput = MismatchHistory(), Throughput.from_actor(self.actor)

    def run(self) -> int:
        """Train from `step` to `train.steps`; return the number of finished steps.

        Collective: every rank runs it. A requested stop takes effect at a step boundary or while waiting; the loop then
        saves a checkpoint and returns early. After the last publish to colocated engines, the actor stays offloaded.
        """
        if self.publisher is not None:
            with phase("publish"):
                self.recorder.log(self.step, self.publisher.publish(self.step).metrics())
                self.control.barrier()
        colocated = self.config.engine.placement == "colocated"
        try:
            while self.step < self.config.train.steps:
                self._profiler.begin(self.step + 1)
                moved(step=self.step + 1, phase="train")
                metrics = StepMetrics(self._throughput)
                self._wait(metrics)
                batch = self._read(metrics)
                self._update(batch, metrics)
                self.step += 1
                self.token_log.write(self.step)
                for finish in (self._save, self._publish) if colocated else (self._publish, self._save):
                    finish(metrics)
                self.recorder.log(self.step, metrics.finish())
                self.recorder.log_masked(self.step, metrics.masked_tokens)
                self._profiler.end()
        except StopRequested:
            self._stop()
        return self.step

    def _wait(self, metrics: StepMetrics) -> None:
        with metrics.timed("wait"):
            while not self.control.wait_until_ready(self.source, self.step, self.publisher):
                assert self.publisher is not None  # the publisher's engines need the policy
                self.publisher.publish(self.step)  # publish again, to a restarted engine
        if self.publisher is not None:
            self.publisher.onload_actor()

    def _read(self, metrics: StepMetrics) -> StepBatch:
        with metrics.timed("read"):
            batch = self.source.read(self.step)
        metrics.add(batch.metrics)
        return self.policy_logprobs.add(batch, metrics)

    def _update(self, batch: StepBatch, metrics: StepMetrics) -> None:
        method = self.objective.at_step(self.step) if self.objective.needs_teacher else self.objective
        method = with_batch_statistic(method, batch, self.actor.layout)
        self.acceptance.begin()
        for number, update in enumerate(batch.updates, 1):
            another_follows = number < len(batch.updates)
            observe = self.token_log.observer(update)
            stats = self.actor.train_update(
                update.micro_batches, method, another_follows=another_follows, observe=observe
            )
            metrics.add_update(stats, update)
        metrics.add(self.acceptance.settle(batch, self.step))
        self._mismatches.add(self.step, metrics.mismatch)
        metrics.check_mismatch(self.config.rollout.max_mismatch_kl, self.step)

    def _publish(self, metrics: StepMetrics) -> None:
        if self.publisher is not None:
            with metrics.timed("publish"):
                metrics.add(self.publisher.publish(self.step).metrics())
                self.control.barrier()  # rank 0 may wait for an engine longer than a collective may take

    def _save(self, metrics: StepMetrics) -> None:
        if self.checkpoints.due(self.step):
            with metrics.timed("checkpoint"):
                self.checkpoints.save(self.step, metrics.finish())

    def _stop(self) -> None:
        self._profiler.end()
        log.info("stop requested: saving a checkpoint at step %d", self.step)
        if self.publisher is not None:
            try:
                self.publisher.onload_actor()
            except WeightSyncError as error:  # engines terminate at the same time
                log.warning("%s", error)
        self.checkpoints.save(self.step)
