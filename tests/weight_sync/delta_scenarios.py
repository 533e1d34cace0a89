"""Trainer ranks over gloo that publish deltas to fake engines, with faults between the publishes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dppo_megatron import hf
from dppo_megatron.engines.protocol import EngineTimeout
from dppo_megatron.run_dir import RunDir
from dppo_megatron.weights.delta import is_delta
from tests.support.fakes.engine import FakeEngine
from tests.weight_sync.trainer_ranks import trainer
from tests.weights.test_delta import bits

FULL_EVERY, UPDATES = 10, 35
RESTARTED, DAMAGED_FILE, DAMAGED_BASE, LOST_REPLY = 2, 12, 15, 18  # versions


def deltas(models: Path, run: Path, updates: int, quantization: str = "none", **layout: Any) -> dict:
    """Publish updates that change one weight in a hundred, with faults between them; compare the engines at the end
    with a model written directly."""
    settings = {"transport": "shared_storage", "full_every": FULL_EVERY}
    settings["engine"] = {"dtype": "bf16", "quantization": quantization}
    with trainer(models, run, engines=2, **settings, **layout) as t:
        lost: list[int] = []
        if t.engines:
            one, two = t.engines
            loads = one.load_weights, two.load_weights

            async def damaged(path: Path, version: int, mode: str = "keep") -> float:
                if version == DAMAGED_FILE and is_delta(path):
                    for file in path.glob("*.safetensors"):
                        file.write_bytes(file.read_bytes()[:-2])
                return await loads[0](path, version, mode)

            async def reply_lost(path: Path, version: int, mode: str = "keep") -> float:
                paused_s = await loads[1](path, version, mode)
                if version == LOST_REPLY and version not in lost:
                    lost.append(version)
                    raise EngineTimeout(f"engine {two.url}: no answer")
                return paused_s

            one.load_weights, two.load_weights = damaged, reply_lost
        published, kept = [], []
        for version in range(updates):
            t.move(0.01, version)
            if t.engines:
                if version == RESTARTED:
                    two.down, two.weights, two.served = True, {}, -1
                elif version == RESTARTED + 3:
                    two.down, two.instance = False, "second"
                if version == DAMAGED_BASE:
                    for file in RunDir(run).weights_of(version - 1).glob("*.safetensors"):
                        file.write_bytes(file.read_bytes()[:-2])
            published.append(t.publisher.publish(version))
            kept.append(len(list(RunDir(run).weights.glob("v*"))))
        hf.save_hf(
            t.actor.model_chunks,
            run / "whole",
            models / f"{t.actor.family}-a",
            dtype=torch.bfloat16,
            quantization=None if quantization == "none" else quantization,
        )
        whole = hf.SafetensorsDirectory(run / "whole")

        def same(engine: FakeEngine, name: str) -> bool:
            return name in engine.weights and torch.equal(bits(engine.weights[name]), bits(whole.tensor(name)))

        return {
            "unlike": [(e.url, name) for e in t.engines for name in whole.tensors if not same(e, name)],
            "published": published,
            "kept": kept,
            "size": sum(info.nbytes for info in whole.tensors.values()),
        }


def all_changes(models: Path, run: Path) -> dict:
    settings = {"transport": "shared_storage", "full_every": 3}
    with trainer(models, run, "qwen3", tp=2, **settings) as t, captured_log("dppo_megatron.weight_sync") as told:
        published = []
        for version in range(7):
            t.move(1.0, version)
            published.append(t.publisher.publish(version))
        left = [path.name for path in RunDir(run).weights.iterdir() if is_delta(path)]
        return {"told": told, "published": published, "deltas": left}


@contextmanager
def captured_log(name: str) -> Iterator[list[str]]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger(name).addHandler(handler)
    try:
        yield told
    finally:
        logging.getLogger(name).removeHandler(handler)
