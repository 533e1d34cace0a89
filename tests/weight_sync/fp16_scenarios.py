"""Engines in fp16, and weights that it cannot hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dppo_megatron.hf import ModelError
from tests.weight_sync.trainer_ranks import trainer

BEYOND = 70_000.0


def overflows(models: Path, run: Path, **weight_sync: Any) -> dict:
    """A policy that fits, then one with a value beyond fp16 on the last rank alone."""
    with trainer(models, run, "qwen3", tp=2, engine={"dtype": "fp16"}, **weight_sync) as t:
        t.load("a")
        t.publisher.publish(0)
        before = dict(t.engines[0].weights) if t.engines else {}
        t.load("b")
        if torch.distributed.get_rank() == 1:
            t.actor.model_chunks[0].decoder.layers[1].mlp.linear_fc2.weight.data[3, 4] = BEYOND
        try:
            t.publisher.publish(1)
            message = "nothing raised"
        except ModelError as error:
            message = str(error)
        everyone = [""] * 2
        torch.distributed.all_gather_object(everyone, message)
        held = t.engines[0].weights if t.engines else {}
        kept = all(torch.equal(held[name], tensor) for name, tensor in before.items())
        return {
            "messages": everyone,
            "kept": kept and held.keys() == before.keys(),
            "dtypes": {tensor.dtype for tensor in before.values()},
            "left": sorted(path.name for path in run.glob("weights/*1*")),
        }
