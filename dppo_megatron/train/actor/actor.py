"""Trains the policy in Megatron-core on this rank's micro-batches, and computes log-probs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from dppo_megatron.config.schema import Config
from dppo_megatron.errors import ExpectedError
from dppo_megatron.hf import load_into, read_hf_config
from dppo_megatron.hf.peft import load_peft
from dppo_megatron.objectives import ObjectiveProtocol, reduce_metrics
from dppo_megatron.report.profiling import phase
from dppo_megatron.types import TokenBatch

from . import megatron_version, offload, precision
from .batch.packing import MicroBatch, Packer, sequence
from .batch.routing import RoutingReplay
from .checkpoint import save_load
from .checkpoint.sharded import ShardedSave
from .checkpoint.writer import BackgroundWrite
from .experts import describe_experts
from .forward import LossStep, UpdateTotal, reduce_reports, run_schedule
from .layout import Layout
from .loss_scale import LossScale
from .model import PolicyModel, build_model
from .model_config import shares_prefixes, transformer_config, use_transformer_engine
from .optimizer import UpdateResult, build_optimizer, build_schedule, learning_rate, optimizer_step, wrap_data_parallel
from .parameter_gather import ParameterGather
from .scoring import Scorer, Scores, describe_outlier

log = logging.getLogger(__name__)


class TrainingDiverged(ExpectedError, RuntimeError):
    """Raised when too many updates in a row had non-finite gradients."""


@dataclass(frozen=True)
class UpdateStats(UpdateResult, UpdateTotal):
    """Reports an update. Only times differ between ranks."""

    skipped_in_a_row: int  # overflows are not counted
    metrics: dict[str, float]  # the objective's metrics and the entropy, over the whole global batch
    forward_backward_s: float
    optimizer_s: float
    loss_scale: float | None  # fp16: the loss was multiplied by it


class Actor:
    """Builds the configured model on this rank, with an optimizer and a schedule.

    All ranks must call the methods that train, score, load or save.

    Weights are random (seeded by `run.seed`) until `load_hf` or `load_checkpoint`. Raises ModelError with every reason
    why the model cannot be built.
    """

    def __init__(self, config: Config, layout: Layout):
        self.config = config
        self.layout = layout
        self.hf = read_hf_config(config.model.path)
        self.transformer = transformer_config(self.hf, config)
        self.model_chunks: list[PolicyModel] = build_model(self.hf, config, layout, self.transformer)
        self.frozen_chunks: list[PolicyModel] = []  # other policies on this rank; `offloaded` moves them too
        self.model = wrap_data_parallel(self.model_chunks, self.transformer, config)
        # loss_weight includes the denominators: the token count that the schedule gathers must not divide again.
        self.transformer.finalize_model_grads_func = _finalize_without_division
        self._gather = ParameterGather(self.model)
        self.optimizer = build_optimizer(self.model, config)
        self.loss_scale: LossScale | None = None
        if config.model.dtype == "fp16":
            self.loss_scale = LossScale(config.optimizer.loss_scale)
            self.loss_scale.serve(self.optimizer)
            self.transformer.grad_scale_func = self.loss_scale.scaled
        self.schedule = build_schedule(self.optimizer, config)
        self.optimizer_on_device: Callable[[], AbstractContextManager[None]] = nullcontext
        if config.optimizer.offload:
            on_host = offload.OptimizerOnHost(self.optimizer, self.model_chunks, layout.device)
            self.optimizer_on_device = on_host.on_device
        self.skipped_in_a_row = 0
        self.lr_scale = 1.0  # multiplies the scheduled learning rate in later updates; a checkpoint stores it
        self.sharded_save = ShardedSave()
        self._writing: BackgroundWrite | None = None
        self.routing = RoutingReplay(self.hf, self.model_chunks) if config.rollout.routing_replay else None
        self.packer = Packer.build(self.hf, config, layout, self.routing.held_layers if self.routing else None)
        self.shares_prefixes = shares_prefixes(self.hf, config)  # whether micro-batches may share prompts
        self._scorer = Scorer(self.model, self.packer, layout, self.hf.vocab_size, config.train.micro_batch_tokens)

    def describe(self) -> list[str]:
        """Return the first lines of the log: model, precision, layers, kernels, layout."""
        m, hf = self.config.model, self.hf
        implementations = precision.implementations(transformer_engine_layers=use_transformer_engine(self.config))
        return [
            f"{hf.architecture}: {hf.num_layers} layers, hidden {hf.hidden_size}, "
            f"vocabulary {hf.vocab_size}; {self.num_parameters():,} parameters on this rank{self._trained()}",
            f"megatron-core {megatron_version.version}: {implementations}",
            f"precision: {precision.describe(self.config)}; logits {m.logits}, recompute {m.recompute}",
            *describe_experts(self.model_chunks, self.config),
            self.layout.describe(),
        ]

    def num_parameters(self) -> int:
        """Return the number of parameters on this rank."""
        return sum(p.numel() for chunk in self.model_chunks for p in chunk.parameters())

    def _trained(self) -> str:
        lora = self.config.model.lora
        if not lora.r:
            return ""
        num_trained = sum(p.numel() for chunk in self.model_chunks for p in chunk.parameters() if p.requires_grad)
        return (
            f", of which {num_trained:,} are trained: LoRA r {lora.r}, alpha {lora.alpha:g}, {', '.join(lora.targets)}"
        )

    @property
    def lr(self) -> float:
        """Return the learning rate of the next update."""
        return learning_rate(self.optimizer) * self.lr_scale

    def load_hf(self, directory: str | Path) -> None:
        """Load weights from an HF directory or a Megatron checkpoint, but no optimizer state and no schedule.

        Raises ModelError listing every tensor that does not fit.
        """
        load_into(self.model_chunks, directory, self.hf)
        with self.optimizer_on_device():
            self.optimizer.reload_model_params()

    def load_start(self) -> None:
        """Load the run's start weights, and the adapters from `model.lora.adapter`."""
        self.load_hf(self.config.model.start)
        lora = self.config.model.lora
        if lora.r and lora.adapter is not None:
            load_peft(self.model_chunks, lora.adapter, self.hf, lora)
            with self.optimizer_on_device():
                self.optimizer.reload_model_params()

    def train_update(
        self,
        micro_batches: Sequence[TokenBatch],
        objective: ObjectiveProtocol,
        *,
        another_follows: bool = False,
        observe: Callable[[MicroBatch, Tensor], None] | None = None,
    ) -> UpdateStats:
        """Run an optimizer update on `micro_batches`. All ranks of a replica pass the same micro-batches.

        The loss is sum(loss_weight * objective loss) over all micro-batches of all data-parallel ranks, so the gradient
        does not depend on how the batch was split. Data-parallel ranks pass the same number of micro-batches. An update
        with non-finite gradients or logits changes nothing, is reported as skipped, and logs the token that differs
        most from the rollout. Gradients beyond fp16 lower the loss scale. `another_follows` promises that the next call
        is `train_update` again and that nothing uses the weights in between. The weights are then gathered during the
        next forward pass. `LossStep` describes `observe`.
        Raises TrainingDiverged after `optimizer.max_skipped_in_a_row` skipped updates that no smaller loss scale could
        avoid, and ValueError if there are no micro-batches.
        """
        with phase("forward_backward") as computing:
            prepared = self.packer.whole_rounds(micro_batches, whole_sequences=objective.needs_sequences)
            for chunk in self.model:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            masked = torch.zeros(self.hf.vocab_size, dtype=torch.long, device=self.layout.device)
            step = LossStep(objective, self.hf.vocab_size, self.layout, masked, observe=observe)
            with self._gather.behind_forward():
                results = run_schedule(step, self.model, prepared, self.config.train.micro_batch_tokens)
            step.checks.raise_if_failed()
            total = reduce_reports(results, prepared[: len(micro_batches)], masked, self.layout)
            if self.routing is not None:
                replayed = [batch.packed.replay for batch in prepared[: len(micro_batches)]]
                total.parts.update(self.routing.disagreement(replayed, self.layout.device))
            self._synchronize()
        with phase("optimizer") as stepping:
            loss_scale = None if self.loss_scale is None else self.loss_scale.value
            with self.optimizer_on_device():
                update = optimizer_step(
                    self.optimizer,
                    self.schedule,
                    clip=self.config.optimizer.grad_clip,
                    lr_scale=self.lr_scale,
                    refuse=total.nonfinite_tokens > 0,
                    loss_scale=self.loss_scale,
                )
            if not update.skipped:
                self._gather.after_update(trains_next=another_follows)
            if update.overflowed:
                log.info("gradients overflowed in fp16 at a loss scale of %g: the update is skipped", loss_scale)
            else:
                self.skipped_in_a_row = self.skipped_in_a_row + 1 if update.skipped else 0
            self._synchronize()
        if update.skipped and not update.overflowed:
            outlier = describe_outlier(micro_batches, self.scores(micro_batches))
            log.warning("the update is skipped, grad norm %g; furthest from mu: %s", update.grad_norm, outlier)
        stats = UpdateStats(
            **vars(total),
            **vars(update),
            skipped_in_a_row=self.skipped_in_a_row,
            metrics=reduce_metrics(total.parts),
            forward_backward_s=computing.seconds,
            optimizer_s=stepping.seconds,
            loss_scale=loss_scale,
        )
        if self.skipped_in_a_row >= self.config.optimizer.max_skipped_in_a_row:
            raise TrainingDiverged(
                f"{self.skipped_in_a_row} updates in a row skipped for non-finite gradients (grad norm "
                f"{stats.grad_norm}, {stats.nonfinite_tokens} tokens with non-finite logits); resume "
                "with a lower optimizer.lr, or from an earlier checkpoint"
            )
        return stats

    def scores(self, micro_batches: Sequence[TokenBatch], *, topk: bool = False) -> list[Scores]:
        """Compute log-probs for every micro-batch with the current weights, forward only; see `Scorer`."""
        self._gather.require_whole()
        return self._scorer(micro_batches, topk=topk)

    def logprobs(self, micro_batches: Sequence[TokenBatch]) -> list[Tensor]:
        """Return the fp32 log-probs [T] of each micro-batch's targets on the CPU; 0 where masked out.

        Uses the current weights and the micro-batch temperature, and runs no backward pass. All ranks of a replica
        return the same values.
        """
        return [scores.logprob for scores in self.scores(micro_batches)]

    def score(self, token_ids: np.ndarray) -> np.ndarray:
        """Return fp32 log-probs [S - 1] for all tokens of a sequence [S] except the first, at temperature 1."""
        (logprobs,) = self.logprobs([sequence(token_ids)])
        return logprobs[:-1].numpy()

    def offloaded(self) -> AbstractContextManager[int]:
        """Move the actor and the frozen models to host memory within the context.

        Engines on the same GPU can use the freed memory meanwhile. See `offload.offloaded`.
        """
        self._gather.require_whole()
        return offload.offloaded([*self.model_chunks, *self.frozen_chunks], self.optimizer, self.layout.device)

    def save_checkpoint(self, directory: Path, step: int, state: dict[str, Any], keep: int) -> None:
        """Write everything that training needs to continue exactly, as `directory/step-NNNNNN`; keep the newest `keep`.

        `state` is the caller's state as JSON. With `checkpoint.asynchronous` the call returns before the checkpoint is
        written, and an error of the previous checkpoint is raised here. See `save_load.save`.
        """
        self._gather.require_whole()
        self.finish_checkpoint()
        with self.optimizer_on_device():
            self._writing = save_load.save(self, Path(directory), step, state, keep)

    def finish_checkpoint(self) -> None:
        """Wait until the last checkpoint is complete. Raises CheckpointError if the write failed or takes too long."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            save_load.finish(writing)

    def settle_checkpoint(self) -> None:
        """After an error in training, complete a checkpoint that is being written. No collective. Raises nothing."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            try:
                writing.wait()
            except Exception as error:
                log.error("the last checkpoint was not written: %s", error)

    def load_checkpoint(self, directory: Path) -> dict[str, Any] | None:
        """Restore the newest complete checkpoint in `directory`; return the caller's state, None without a checkpoint.

        Raises CheckpointError if the checkpoint does not fit this run. See `save_load.load`.
        """
        with self.optimizer_on_device():
            return save_load.load(self, Path(directory))

    def _synchronize(self) -> None:
        if self.layout.device.type == "cuda":
            torch.cuda.synchronize()


def _finalize_without_division(model: list, num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Reduce gradients as Megatron does, but do not divide them by the number of tokens."""
    finalize_model_grads(model, None, **kwargs)
