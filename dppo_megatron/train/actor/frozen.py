"""Scores with frozen models on the trainer's ranks: the reference policy of a KL penalty, and a teacher.

A frozen model has the actor's layout and is offloaded with the actor. It adds a copy of its parameters to each rank, in
`model.dtype`, without gradients and optimizer. All ranks must construct it. The constructor raises ModelError listing
every tensor that does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dppo_megatron.config import Config
from dppo_megatron.hf import HFModelConfig, load_into, read_hf_config
from dppo_megatron.rollout.engines.teachers import trainer_teacher_config
from dppo_megatron.types import TokenBatch

from .actor import Actor
from .batch.packing import Packer
from .forward import MostLikelyStep
from .lora import without_adapters
from .model import PolicyModel, build_model
from .model_config import transformer_config
from .scoring import Scorer, Scores


class Reference:
    """Scores with `model.start`, also in resumed runs.

    With `model.lora` the reference is the actor without adapters, so it needs no memory. The routers choose the experts
    themselves, even with `rollout.routing_replay`.
    """

    def __init__(self, actor: Actor):
        config, hf = actor.config, actor.hf
        self._chunks = actor.model_chunks if config.model.lora.r else _frozen(actor, hf, config)
        packer = replace(actor.packer, held_layers=None)  # without the policy's recorded experts
        self._scorer = Scorer(self._chunks, packer, actor.layout, hf.vocab_size, config.train.micro_batch_tokens)

    def scores(self, micro_batches: Sequence[TokenBatch]) -> list[Scores]:
        """Compute the start model's log-probs of every micro-batch's targets; see `Scorer`."""
        with without_adapters(self._chunks):
            return self._scorer(micro_batches)


class TrainerTeacher:
    """Lists the tokens that `Config.trainer_teacher` finds most likely."""

    def __init__(self, actor: Actor):
        config = trainer_teacher_config(actor.config)
        hf, layout = read_hf_config(config.model.path), actor.layout
        packer = Packer.build(hf, config, layout, None)
        chunks = _frozen(actor, hf, config)
        self._scorer = Scorer(chunks, packer, layout, hf.vocab_size, config.train.micro_batch_tokens)
        self._step = MostLikelyStep(hf.vocab_size, layout, k=config.distillation.topk)
        self._vocab_size = actor.hf.vocab_size  # larger ids belong to the padding of an embedding

    def with_lists(self, micro_batches: Sequence[TokenBatch]) -> list[dict[str, dict[str, Tensor]]]:
        """Return each micro-batch's `extra` with teacher_logprob [T], teacher_ids and teacher_topk_logprob [T, K]."""
        out = []
        for batch, scored in zip(micro_batches, self._scorer.columns(micro_batches, self._step), strict=True):
            logprob, topk, ids = scored.cpu().tensor_split([1, 1 + self._step.k], dim=1)
            ids = torch.where(ids < self._vocab_size, ids, -1).int()
            lists = {"teacher_logprob": logprob[:, 0], "teacher_ids": ids, "teacher_topk_logprob": topk}
            out.append({"extra": {**batch.extra, **lists}})
        return out


def _frozen(actor: Actor, hf: HFModelConfig, config: Config) -> list[PolicyModel]:
    chunks = build_model(hf, config, actor.layout, transformer_config(hf, config))
    load_into(chunks, config.model.start, hf)
    for chunk in chunks:
        chunk.requires_grad_(False)
        chunk.eval()
    actor.frozen_chunks += chunks
    return chunks
