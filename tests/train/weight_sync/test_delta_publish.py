"""Deltas from real trainer ranks give fake engines the bits of a whole publish, despite faults."""

import logging
from pathlib import Path

import pytest
import torch

from dppo_megatron import hf
from dppo_megatron.rollout.engines.protocol import EngineTimeout
from dppo_megatron.run_dir import RunDir
from dppo_megatron.train.weight_sync.publisher import PublishResult
from dppo_megatron.weights.delta import is_delta
from tests.support.actor_ranks import Rank, on_ranks, slow
from tests.support.fakes.engine import FakeEngine
from tests.train.weight_sync.trainer_ranks import trainer
from tests.weights.test_delta import bits

FULL_EVERY, UPDATES = 10, 35
RESTARTED, DAMAGED_FILE, DAMAGED_BASE, LOST_REPLY = 2, 12, 15, 18  # versions
LAYOUTS = {
    "short": {"family": "qwen3", "tp": 2},
    "tied": {"family": "tied", "tp": 2},
    "dense": {"family": "wide", "pp": 2},
    "moe": {"family": "qwen3_moe", "ep": 2},
}


def publish_deltas(
    rank: Rank, updates: int, quantization: str = "none", **layout
) -> tuple[list[PublishResult], list[int], int]:
    """Publish updates that change one weight in a hundred, with faults between them.

    Meanwhile one engine is away and comes back with nothing, a file is damaged after the trainer wrote it and before
    it writes the next, and a reply is lost. Every publish compares fingerprints; at the end the engines must have the
    bits of a model written directly. Returns the publishes, the versions kept after each, and the bytes of the model.
    """
    settings = {"transport": "shared_storage", "full_every": FULL_EVERY}
    settings["engine"] = {"dtype": "bf16", "quantization": quantization}
    with trainer(rank, engines=2, **settings, **layout) as t:
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
                    for file in RunDir(rank.directory).weights_of(version - 1).glob("*.safetensors"):
                        file.write_bytes(file.read_bytes()[:-2])
            published.append(t.publisher.publish(version))
            kept.append(len(list(RunDir(rank.directory).weights.glob("v*"))))
        hf.save_hf(
            t.actor.model_chunks,
            rank.directory / "whole",
            rank.models / f"{t.actor.family}-a",
            dtype=torch.bfloat16,
            quantization=None if quantization == "none" else quantization,
        )
        whole = hf.SafetensorsDirectory(rank.directory / "whole")

        def same(engine: FakeEngine, name: str) -> bool:
            return name in engine.weights and torch.equal(bits(engine.weights[name]), bits(whole.tensor(name)))

        assert all(same(engine, name) for engine in t.engines for name in whole.tensors)
        return published, kept, sum(info.nbytes for info in whole.tensors.values())


@pytest.mark.parametrize("name", ["short", *map(slow, ("tied", "dense", "moe"))])
@on_ranks(2)
def test_engines_that_receive_deltas_hold_the_bits_of_a_whole_publish(rank: Rank, name: str):
    published, kept, size = publish_deltas(rank, RESTARTED + 4 if name == "short" else UPDATES, **LAYOUTS[name])
    whole = [p.version for p in published if p.changed_share is None]
    if name == "short":
        assert whole == [0]
    else:
        assert whole == [0, FULL_EVERY, DAMAGED_FILE, DAMAGED_BASE, 2 * FULL_EVERY, 3 * FULL_EVERY]
        assert [p.version for p in published if p.unconfirmed] == [RESTARTED, RESTARTED + 1, RESTARTED + 2, LOST_REPLY]
        assert max(kept) <= FULL_EVERY + 2
        assert kept[2 * FULL_EVERY + 1] < 5
    for p in published:
        if p.version in whole:
            assert p.nbytes >= size
        else:
            assert 0.003 < p.changed_share < 0.02
            assert p.nbytes < size / 2 - 500


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["fp8_block", "fp8_block_emulated"])
@on_ranks(2)
def test_a_delta_of_quantised_weights_holds_a_part_of_them(rank: Rank, quantization: str):
    published, _, _ = publish_deltas(rank, RESTARTED + 4, quantization, family="wide", tp=2)
    assert all(0 < p.changed_share < 0.5 for p in published[1:])


@on_ranks(2)
def test_a_delta_as_large_as_the_model_is_not_sent_and_the_log_reports_it(rank: Rank):
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("dppo_megatron.train.weight_sync")
    logger.addHandler(handler)
    with trainer(rank, "qwen3", tp=2, transport="shared_storage", full_every=3) as t:
        for version in range(7):
            t.move(1.0, version)
            assert t.publisher.publish(version).changed_share is None
        assert not any(map(is_delta, RunDir(rank.directory).weights.iterdir()))
    logger.removeHandler(handler)
    if rank.rank == 0:
        assert len(told) == 2, "tried once for every whole publish that was due"
        assert "more than 80% of the model" in told[0]
        assert "the next 2 are whole too (weight_sync.full_every)" in told[0]
