"""Defines the typed tree of all settings.

Each field is described once, in the section's file in this folder. Defaults follow the DPPO paper where it gives a
value. A field's type has the rules for the value; `dppo_megatron.run.checks` has the rules between fields.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from .distillation import DistillationConfig
from .engine import EngineConfig, RolloutConfig, WeightSyncConfig
from .model import AcceptanceConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from .objective import ObjectiveConfig
from .section import Count, CountFromZero, FilePath, Int, Seconds, Section, setting
from .slurm import SlurmConfig
from .task import HELDOUT, DataConfig, EnvironmentConfig, EvalConfig, EvalSet, RewardConfig


class RunConfig(Section):
    dir: FilePath = Field(description="run directory: resolved config, bank, weights, checkpoints, logs, metrics")
    seed: Int = setting(1, "seeds prompt order, sampling and dropout", ge=0, lt=1 << 32)
    stall_timeout_s: Seconds = setting(1800.0, "time limit of a wait without progress")


class CheckpointConfig(Section):
    every: CountFromZero = setting(50, "steps between checkpoints; 0 = only at the end")
    final: bool = setting(
        True,
        "write a checkpoint after the last step; without it RUN/model is still written, but a resume with more steps "
        "repeats those since the last checkpoint",
    )
    keep: Count = setting(2, "newest checkpoints that stay on disk")
    keep_rollouts: CountFromZero | None = setting(
        None,
        "steps before the newest checkpoint whose rollouts stay in the bank, besides those needed to resume from a "
        "kept checkpoint; default: all steps",
    )
    asynchronous: bool = setting(False, "train while a checkpoint is written; costs a host copy of this rank's part")
    timeout_s: Seconds = setting(1800.0, "asynchronous: time limit of a write without progress on the disk")


class TrackingConfig(Section):
    tensorboard: bool = setting(False, "write RUN/tensorboard")
    wandb: Literal["off", "offline", "online"] = setting("off", "log to Weights & Biases")
    wandb_project: str = setting("dppo_megatron", "project of the run in Weights & Biases")
    wandb_name: str | None = setting(None, "name of the run in wandb; default: that of run.dir")
    token_sequences: CountFromZero = setting(
        0,
        "sequences of each step whose tokens are stored in RUN/tokens with the trainer's log-prob, entropy, "
        "divergence and mask, for `dppo-megatron view`; 17 bytes a token",
    )


class ProfileConfig(Section):
    steps: tuple[Count, ...] = setting((), "steps to trace, counted from 1 as in the metrics, e.g. [3]")
    ranks: tuple[CountFromZero, ...] = setting((0,), "trainer ranks that write RUN/profile/step_N_rank_R")
    memory: bool = setting(False, "also write a snapshot of CUDA memory at the end of each of these steps")


class Config(Section):
    run: RunConfig
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    distillation: DistillationConfig = DistillationConfig()
    train: TrainConfig
    acceptance: AcceptanceConfig = AcceptanceConfig()
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    engine: EngineConfig = EngineConfig()
    rollout: RolloutConfig = RolloutConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    tracking: TrackingConfig = TrackingConfig()
    profile: ProfileConfig = ProfileConfig()
    slurm: SlurmConfig = SlurmConfig()

    @model_validator(mode="after")
    def _derive(self) -> Self:
        e = self.engine
        updates = {"dtype": e.dtype or self.model.dtype, "max_model_len": e.max_model_len or self._longest[0]}
        object.__setattr__(self, "engine", e.model_copy(update=updates))  # the attribute is frozen for callers
        return self

    @property
    def horizon(self) -> int:
        return self.objective.horizon or self.rollout.max_response_tokens

    @property
    def probe_tolerance(self) -> float:
        """Return the largest mean engine-trainer log-prob difference, in nats, that the precisions explain."""
        if self.weight_sync.probe_tolerance is not None:
            return self.weight_sync.probe_tolerance
        if self.engine.exact:
            return 0.0
        if self.engine.quantization != "none" or self.model.fp8 != "none":
            return 1.0
        # An fp16 significand has three more bits than a bf16 significand, so the rounding error is an eighth.
        tolerance = {"fp32": 1e-4, "fp16": 0.05, "bf16": 0.3}
        return max(tolerance[self.model.dtype], tolerance[self.engine.dtype])

    @property
    def samples(self) -> bool:
        """Return whether the run samples rollouts. If so, an orchestrator and engines with its weights serve it."""
        return not self.objective.supervised and self.rollout.bank is None

    @property
    def started_engines(self) -> int:
        """Return how many engines the run starts."""
        return self.engine.count if self.samples and not self.engine.urls else 0

    @property
    def started_teachers(self) -> dict[str, Path]:
        """Return the model path for each teacher that the run serves, by teacher name."""
        teachers = self.distillation.teachers if self.samples else {}
        return {name: t.path for name, t in teachers.items() if t.path is not None and not t.in_trainer}

    @property
    def trainer_teacher(self) -> Path | None:
        """Return the model path for the teacher in the trainer's memory, or None."""
        return next((teacher.path for teacher in self.distillation.teachers.values() if teacher.in_trainer), None)

    @property
    def servers_teach(self) -> bool:
        """Return whether servers list the teachers' tokens, so that the bank has these lists."""
        return bool(self.distillation.teachers) and self.trainer_teacher is None

    @property
    def engine_devices(self) -> int:
        """Return how many GPUs the started engines use."""
        return self.started_engines * self.engine.devices

    @property
    def eval_sets(self) -> dict[str, EvalSet]:
        """Return every evaluated set by name, with defaults for an unset length, grader and template."""
        greedy = {"path": self.data.eval, "pass_reward": self.eval.pass_reward}
        heldout = {} if self.data.eval is None else {HELDOUT: EvalSet.model_validate(greedy)}
        longest = self.eval.max_response_tokens or self.rollout.max_response_tokens
        return {
            name: one.model_copy(
                update={
                    "max_response_tokens": one.max_response_tokens or longest,
                    "reward": one.reward or self.reward,
                    "prompt_template": one.prompt_template or self.data.prompt_template,
                }
            )
            for name, one in (heldout | self.eval.sets).items()
        }

    def data_of(self, one: EvalSet) -> DataConfig:
        """Return the settings for reading an evaluated set's rows."""
        return self.data.model_copy(update={"prompt_template": one.prompt_template})

    @property
    def response_tokens(self) -> dict[str, int]:
        """Return the longest trained or evaluated response, in tokens, that each setting allows, by setting."""
        lengths = {"rollout.max_response_tokens": self.rollout.max_response_tokens}
        for name, one in self.eval_sets.items():
            set_limit = name in self.eval.sets and self.eval.sets[name].max_response_tokens
            setting = f"eval.sets.{name}" if set_limit else "eval" if self.eval.max_response_tokens else "rollout"
            lengths[f"{setting}.max_response_tokens"] = one.max_response_tokens or 0
        return lengths

    @property
    def _longest(self) -> tuple[int, str]:
        setting, response = max(self.response_tokens.items(), key=lambda item: item[1])
        prompt = self.data.max_prompt_tokens
        return prompt + response, f"data.max_prompt_tokens = {prompt} + {setting} = {response}"

    def too_long(self, positions: int, prompt: int | None = None, response: int = 0, sampled: int = 0) -> str | None:
        """Describe the sequence that exceeds `positions` or a limit in the config. Return None if no sequence does.

        positions: tokens that a model or server can read.
        prompt, response: tokens in an existing sequence; default: the longest sequence that may be sampled. An existing
        response may have up to `rollout.max_response_tokens`.
        sampled: 1 if the sequence goes to a server, which samples another token.
        """
        if prompt is None:
            tokens, settings = self._longest
            return settings if tokens > positions else None
        if response > (limit := self.rollout.max_response_tokens):
            return f"a response of {response} tokens, but rollout.max_response_tokens = {limit}"
        whole = f"a prompt and response of {prompt} + {response} tokens, but the model has {positions} positions"
        whole += ", one of them for a token that the server samples" * sampled
        return whole if prompt + response + sampled > positions else None

    @property
    def request_timeout_s(self) -> float:
        """Return how many seconds an engine request may take."""
        return self.engine.request_timeout_s or 600.0 + 0.5 * max(self.response_tokens.values())

    @property
    def data_parallel(self) -> int:
        p = self.parallel
        return p.world_size // (p.tensor * p.pipeline * p.context)
