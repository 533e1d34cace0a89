"""Traces of one sequence in several layouts. Runs on all ranks; rank 0 has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.support.actor_cases import VOCAB
from tests.support.actor_ranks import Rank

LAYOUTS = {
    "qwen3": {
        "data": {},
        "tensor": {"tensor": 2},
        "sequence": {"tensor": 2, "sequence": True},
        "pipeline": {"pipeline": 2},
    },
    "qwen3_moe": {"data": {}, "sequence": {"tensor": 2, "sequence": True}, "expert": {"expert": 2}},
}


def traces(rank: Rank) -> Any:
    """Return by model and layout the policy's values, and those of operators with noise as input."""
    from dppo_megatron.actor.batch.packing import sequence
    from dppo_megatron.actor.trace import CannotTrace, trace

    batch = sequence(np.arange(3, 14) % VOCAB)  # 11 tokens: padded for two ranks
    results = {}
    for model, layouts in LAYOUTS.items():
        noise = None
        for name, layout in layouts.items():
            with rank.actor(model, **layout) as actor:
                own = trace(actor, batch)
                if noise is None:
                    noise = _noise(own)
                results[model, name] = own, trace(actor, batch, noise)
    with rank.actor("qwen3", context=2) as actor:
        try:
            trace(actor, batch)
        except CannotTrace as error:
            results["context"] = str(error)
    return results


def _noise(own: dict) -> dict:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(3)
    shared = [{key: torch.randn(value.shape, generator=generator) for key, value in own.items()}]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]
