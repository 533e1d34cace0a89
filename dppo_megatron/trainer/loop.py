"""Run the steps of training."""

from __future__ import annotations

import logging

from dppo_megatron.actor import Actor
from dppo_megatron.common.heartbeat import moved
from dppo_megatron.config import Config
from dppo_megatron.objectives import ObjectiveProtocol
from dppo_megatron.observability.profiling import StepProfiler, phase
from dppo_megatron.run_dir import RunDir
from dppo_megatron.weight_sync import Publisher, WeightSyncError

from .acceptance import Acceptance
from .batches import BatchSource
from .checkpoints import Checkpoints
from .control import Control, StopRequested
from .metrics import MismatchHistory, StepMetrics, Throughput
from .policy_logprobs import PolicyLogprobs, with_batch_statistic
from .recorder import RankZeroRecorder
from .token_log import TokenLog

log = logging.getLogger(__name__)


def train(
    config: Config,
    *,
    actor: Actor,
    objective: ObjectiveProtocol,
    source: BatchSource,
    policy_logprobs: PolicyLogprobs,
    acceptance: Acceptance,
    publisher: Publisher | None,
    checkpoints: Checkpoints,
    control: Control,
    recorder: RankZeroRecorder,
    token_log: TokenLog,
    first_step: int,
) -> int:
    """Train from `first_step` to `train.steps`; return the number of finished steps.

    Collective: every rank runs it. `publisher` is None without engines (supervised training). A requested stop takes
    effect at a step boundary or while waiting, after a checkpoint, and returns early.
    Colocated engines and the actor use the GPUs in turn: `publish` offloads the actor, and `onload_actor` puts the
    engines to sleep. After the last publish the actor stays offloaded.
    """
    step = first_step
    colocated = config.engine.placement == "colocated"
    profiler = StepProfiler(config.profile, RunDir(config.run.dir).profile, actor.layout.rank)
    mismatches, throughput = MismatchHistory(), Throughput.from_actor(actor)

    def save_if_due(metrics: StepMetrics) -> None:
        if checkpoints.due(step):
            with metrics.timed("checkpoint"):
                checkpoints.save(step, metrics.finish())

    if publisher is not None:
        with phase("publish"):
            recorder.log(step, publisher.publish(step).metrics())
            control.barrier()
    try:
        while step < config.train.steps:
            profiler.begin(step + 1)
            moved(step=step + 1, phase="train")
            metrics = StepMetrics(throughput)
            with metrics.timed("wait"):
                while not control.wait_until_ready(source, step, publisher):
                    assert publisher is not None  # the publisher's engines need the policy
                    publisher.publish(step)  # publish again, to a restarted engine
            if publisher is not None:
                publisher.onload_actor()
            with metrics.timed("read"):
                batch = source.read(step)
            metrics.add(batch.metrics)
            batch = policy_logprobs.add(batch, metrics)
            method = objective.at_step(step) if objective.needs_teacher else objective
            method = with_batch_statistic(method, batch, actor.layout)
            acceptance.begin()
            for number, update in enumerate(batch.updates, 1):
                another_follows = number < len(batch.updates)
                observe = token_log.observer(update)
                stats = actor.train_update(
                    update.micro_batches, method, another_follows=another_follows, observe=observe
                )
                metrics.add_update(stats, update)
            metrics.add(acceptance.settle(batch, step))
            mismatches.add(step, metrics.mismatch)
            metrics.check_mismatch(config.rollout.max_mismatch_kl, step)
            step += 1
            token_log.write(step)
            if colocated:
                save_if_due(metrics)  # publish offloads the actor, and a checkpoint needs it
            if publisher is not None:
                with metrics.timed("publish"):
                    metrics.add(publisher.publish(step).metrics())
                    control.barrier()  # rank 0 may wait for an engine longer than the time-out of a collective
            if not colocated:
                save_if_due(metrics)  # while engines sample
            recorder.log(step, metrics.finish())
            recorder.log_masked(step, metrics.masked_tokens)
            profiler.end()
    except StopRequested:
        profiler.end()
        log.info("stop requested: saving a checkpoint at step %d", step)
        if publisher is not None:
            try:
                publisher.onload_actor()
            except WeightSyncError as error:  # engines terminate at the same time
                log.warning("%s", error)
        checkpoints.save(step)
    return step
