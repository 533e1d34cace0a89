"""The reference policy of a KL penalty: the run's start model, frozen, in the layout of the actor."""

from __future__ import annotations

from collections.abc import Sequence

from dppo_megatron.hf import load_into
from dppo_megatron.types import TokenBatch

from .actor import Actor
from .lora import without_adapters
from .model import build_model
from .model_config import transformer_config
from .scoring import Scorer, Scores


class Reference:
    """`model.start` beside `actor`, whatever the actor has become: a resumed run has the reference it began with.

    Holds one more copy of the parameters on each rank, in `model.dtype`; no gradients, no optimizer. It is
    offloaded with the actor. With `model.lora` it holds nothing: it is the actor without its adapters.
    Building it is collective. Raises ModelError listing every tensor that does not fit.
    """

    def __init__(self, actor: Actor):
        config, layout = actor.config, actor.layout
        chunks = actor.model_chunks
        if not config.model.lora.r:
            chunks = build_model(actor.hf, config, layout, transformer_config(actor.hf, config))
            load_into(chunks, config.model.start, actor.hf)
            for chunk in chunks:
                chunk.requires_grad_(False)
                chunk.eval()
            actor.frozen_chunks += chunks
        self._chunks = chunks
        self._scorer = Scorer(chunks, actor.packer, layout, actor.hf.vocab_size, config.train.micro_batch_tokens)

    def scores(self, micro_batches: Sequence[TokenBatch]) -> list[Scores]:
        """The start model's log-probs of every micro-batch's targets; see `Scorer`."""
        with without_adapters(self._chunks):
            return self._scorer(micro_batches)
