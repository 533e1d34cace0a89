"""Checks that settings with non-default values have an effect, given the other settings.

A feature's limits and sizes may stay when the feature is switched off, because methods are compared by switching.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dppo_megatron.config import Config
from dppo_megatron.errors import shown

from .resume import flat

# Setting or section -> (whether it has an effect, why not). `{.a.b}` is replaced by the value of setting a.b.
_NEEDS: dict[str, tuple[Callable[[Config], object], str]] = {
    "model.lora": (lambda c: c.model.lora.r, "model.lora.r = 0 trains all weights and no adapter"),
    "parallel.sequence": (lambda c: c.parallel.tensor > 1, "needs parallel.tensor > 1"),
    "parallel.virtual_pipeline": (lambda c: c.parallel.pipeline > 1, "needs parallel.pipeline > 1"),
    "parallel.first_stage_layers": (lambda c: c.parallel.pipeline > 1, "needs parallel.pipeline > 1"),
    "parallel.last_stage_layers": (lambda c: c.parallel.pipeline > 1, "needs parallel.pipeline > 1"),
    "optimizer.min_lr": (lambda c: c.optimizer.decay != "constant", "optimizer.decay = constant never reaches it"),
    "optimizer.decay_steps": (lambda c: c.optimizer.decay != "constant", "optimizer.decay = constant has no end"),
    "optimizer.loss_scale": (lambda c: c.model.dtype == "fp16", "model.dtype = {.model.dtype} has no loss scale"),
    "objective.discount": (lambda c: c.objective.credit == "turn", "needs objective.credit = turn"),
    "objective.horizon": (lambda c: c.objective.aggregation.endswith("norm"), "needs seq_mean_token_sum_norm"),
    "acceptance": (lambda c: c.acceptance.bound, "acceptance.bound = null measures nothing"),
    "acceptance.bound": (lambda c: not c.objective.supervised, "bounds a divergence, and supervised training has none"),
    "reward.name": (lambda c: not c.reward.terms, "reward.terms replace it"),
    "reward.settings": (lambda c: not c.reward.terms, "each of reward.terms has its own"),
    "environment": (lambda c: c.environment.source, "neither environment.name nor environment.agent is set"),
    "environment.host": (lambda c: c.environment.agent or not c.environment.source, "needs environment.agent"),
    "rollout.dynamic_sampling": (lambda c: c.samples, "the run samples no rollouts of its own"),
    "rollout.beyond_bound": (lambda c: c.rollout.max_staleness, "with rollout.max_staleness = 0 every step waits"),
    "weight_sync.directory": (lambda c: c.weight_sync.transport != "broadcast", "a broadcast writes no files"),
    "checkpoint.keep_rollouts": (lambda c: c.samples, "the run does not sample rollouts, so it has none to delete"),
    "profile.memory": (lambda c: c.profile.steps, "profile.steps is empty"),
    "eval.every": (lambda c: c.eval_sets, "neither data.eval nor eval.sets names a file"),
    "eval.pass_reward": (lambda c: c.data.eval, "only data.eval uses it; each of eval.sets has its own"),
}
_OF_SERVERS = ("engine.python.", "engine.host.", "engine.port.", "engine.extra_args.", "engine.env.")
# Settings that may have an effect only in the command `eval`, which starts servers and samples from them.
_ONLY_EVAL: tuple[tuple[tuple[str, ...], Callable[[Config], object], str], ...] = (
    (("data.eval.", "eval.sets."), lambda c: c.samples, "the run has given answers or rollouts, and evaluates nothing"),
    (_OF_SERVERS, lambda c: not c.engine.urls, "the servers of engine.urls already run, so give it to these"),
)


def problems(config: Config) -> Iterator[str]:
    for name, value in _changed(config):
        for part, (has_effect, reason) in _NEEDS.items():
            if f"{name}.".startswith(f"{part}.") and not has_effect(config):
                yield f"{name} = {value}: {reason.format(config)}, so it has no effect; remove it"


def notes(config: Config) -> Iterator[str]:
    """Yield warnings about settings that only an evaluation of the run's model reads, not the run."""
    changed = dict(_changed(config))
    for parts, has_effect, reason in _ONLY_EVAL:
        if (unread := [name for name in changed if f"{name}.".startswith(parts)]) and not has_effect(config):
            named = ", ".join(f"{name} = {changed[name]}" for name in unread)
            yield f"warning: {named}: {reason}; only `dppo-megatron eval` reads this setting"


def _changed(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the name and value of each setting that is not the default."""
    for name, value in flat(config.model_dump(mode="json", exclude_defaults=True)):
        yield name, f"{value:g}" if isinstance(value, float) else shown(value)
