"""fp16 is near fp32; an overflow changes only the loss scale, on every rank, and checkpoints keep it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from dppo_megatron.config.model import LARGEST, LossScaleConfig
from dppo_megatron.config.schema import Config
from dppo_megatron.run.checks import settings_problems
from tests.support.actor_cases import actor_config, micro_batches, sequences
from tests.support.actor_ranks import Rank, on_ranks, slow
from tests.train.actor.scenarios.parts import assert_resumed, everywhere, fingerprint, same, topk, train

INITIAL = 1024.0


def layouts(rank: Rank) -> dict[str, dict]:
    if rank.world_size == 1:
        return {"alone": {}, "plain": {"distributed_optimizer": False}, "lora": {"lora": {"r": 4}}}
    return {
        "data": {},
        "data_plain": {"distributed_optimizer": False},
        "tensor": {"tensor": 2, "sequence": True},
        "pipeline": {"pipeline": 2},
        "experts": {"model": "qwen3_moe", "expert": 2},
        "experts_plain": {"model": "qwen3_moe", "expert": 2, "distributed_optimizer": False},
    }


def given_of(*, loss_scale: dict | None = None, optimizer: dict | None = None, **layout: Any) -> dict[str, Any]:
    """What `Rank.actor` takes."""
    settings = {"dtype": "fp16"} | ({"lora": layout.pop("lora")} if "lora" in layout else {})
    scale = {"initial": INITIAL, **(loss_scale or {})}
    return {"settings": settings, "optimizer": {"loss_scale": scale, **(optimizer or {})}, **layout}


def actor_of(rank: Rank, **given: Any):
    return rank.actor(**given_of(**given))


def share(actor) -> list:
    """This rank's micro-batches of the usual sequences."""
    return micro_batches(sequences()[actor.layout.data_parallel_rank :: actor.layout.data_parallel_size], 2)


@contextmanager
def overflow_in(actor, where: str, rank: int) -> Iterator[None]:
    """Plant an infinity in the gradient of one parameter of one rank, as if its backward pass had overflowed."""
    chunk = actor.model_chunks[0]
    parameter = next(p for name, p in chunk.named_parameters() if p.requires_grad and where in name)
    mine = actor.layout.rank == rank
    handle = parameter.register_hook(lambda grad: torch.full_like(grad, torch.inf) if mine else grad)
    yield
    handle.remove()


@on_ranks(1, slow(2))
def test_updates_are_near_those_of_fp32_by_any_scale(rank: Rank):
    """A router that chooses another expert moves single log-probs by up to a nat."""
    for name, layout in (layouts(rank) if rank.world_size == 2 else {"alone": {}}).items():
        with rank.actor(**layout) as actor:
            expected = train(actor, sequences())
        for scale in (1.0, 2.0**14) if rank.world_size == 1 else (2.0**10,):
            with actor_of(rank, loss_scale={"initial": scale}, **layout) as actor:
                got = train(actor, sequences())
            assert got["loss"][0] == pytest.approx(expected["loss"][0], abs=1e-3), name
            assert got["grad_norm"][0] == pytest.approx(expected["grad_norm"][0], rel=5e-3), (name, scale)
            assert got["loss"] == pytest.approx(expected["loss"], abs=5e-3), name
            assert (got["logprobs"] - expected["logprobs"]).abs().mean() < 0.05, name


@on_ranks(1)
def test_gradients_add_up_over_micro_batches(rank: Rank):
    with actor_of(rank) as actor:
        whole = train(actor, sequences(), updates=1, split=1)
    with actor_of(rank) as actor:
        parts = train(actor, sequences(), updates=1, split=4)
    assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-4)
    assert parts["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-3)


@on_ranks(1)
def test_gradients_are_divided_before_they_are_clipped(rank: Rank):
    """The norm is far above grad_clip: a clip of the multiplied gradients would stop training."""
    with actor_of(rank, loss_scale={"initial": 2.0**14}) as actor:
        clipped = train(actor, sequences())
    with actor_of(rank, optimizer={"grad_clip": 0}) as actor:
        free = train(actor, sequences())
    assert clipped["grad_norm"][0] == pytest.approx(free["grad_norm"][0], rel=1e-3)
    assert clipped["grad_norm"][0] > 2 * 0.5
    assert clipped["loss"][1] < clipped["loss"][0] - 0.1


@pytest.mark.megatron_next
@on_ranks(1, slow(2))
def test_an_overflow_on_one_rank_is_skipped_by_all(rank: Rank):
    """In the second of three updates, in every layout."""
    for name, layout in layouts(rank).items():
        with actor_of(rank, **layout) as actor:

            def assert_updated(*expected: Any, actor=actor, name=name) -> None:
                s = actor.train_update(share(actor), topk())
                assert (s.skipped, s.overflowed, s.skipped_in_a_row, s.loss_scale) == expected, name

            assert_updated(False, False, 0, INITIAL)
            before, lr = fingerprint(actor), actor.lr
            with overflow_in(actor, "experts.local" if "experts" in name else "", rank.world_size - 1):
                assert_updated(True, True, 0, INITIAL)
            assert same(before, fingerprint(actor)), name
            assert actor.lr == lr, name
            assert_updated(False, False, 0, INITIAL / 2)
            assert everywhere(not same(before, fingerprint(actor))), name


@on_ranks(1)
def test_the_scale_grows_and_falls_and_then_overflows_count(rank: Rank):
    from dppo_megatron.train.actor import TrainingDiverged

    optimizer, smallest = {"max_skipped_in_a_row": 2}, INITIAL / 2
    with actor_of(rank, loss_scale={"growth_interval": 2, "smallest": smallest}, optimizer=optimizer) as actor:
        grown = [actor.train_update(share(actor), topk()).loss_scale for _ in range(5)]
        assert grown == [INITIAL, INITIAL, 2 * INITIAL, 2 * INITIAL, 4 * INITIAL]
        with overflow_in(actor, "layers.0.mlp", 0):
            fallen = [actor.train_update(share(actor), topk()) for _ in range(4)]
            with pytest.raises(TrainingDiverged, match="2 updates in a row"):
                actor.train_update(share(actor), topk())
        assert [(s.loss_scale, s.overflowed, s.skipped_in_a_row) for s in fallen] == [
            (4 * INITIAL, True, 0), (2 * INITIAL, True, 0), (INITIAL, True, 0), (smallest, False, 1)
        ]  # fmt: skip
    with actor_of(rank, optimizer=optimizer) as actor:
        with torch.no_grad():
            actor.model_chunks[0].decoder.final_layernorm.weight[0] = torch.nan
        s = actor.train_update(share(actor), topk())
        # No scale mends logits that are not finite.
        assert (s.skipped, s.overflowed, s.skipped_in_a_row, actor.loss_scale.value) == (True, False, 1, INITIAL)


@on_ranks(1, slow(2))
def test_a_checkpoint_holds_the_scale_and_how_far_it_is_from_growing(rank: Rank):
    """Saved after an overflow and in the middle of the scale's growth."""

    def overflow(actor) -> None:
        with overflow_in(actor, "", 0):
            actor.train_update(share(actor), topk())

    for name, layout in layouts(rank).items():
        given = given_of(loss_scale={"growth_interval": 3}, **layout)
        assert_resumed(rank, name, given, overflow, updates=3)


def test_without_gradients_the_scale_stays_finite():
    from dppo_megatron.train.actor.loss_scale import LossScale

    scale, largest = LossScale(LossScaleConfig(initial=LARGEST, growth_interval=1)), []
    for overflow in (False, True):
        scale.follow(overflow=overflow)
        largest.append(scale.value)
    assert largest == [LARGEST, LARGEST / 2]


@pytest.mark.parametrize(
    ("dtype", "loss_scale", "told"),
    [
        ("fp16", {}, None),
        ("fp16", {"initial": 2.0**8, "smallest": 2.0**8}, None),
        (
            "fp16",
            {"initial": 0.5},
            "optimizer.loss_scale.smallest = 1: is more than optimizer.loss_scale.initial = 0.5",
        ),
        ("bf16", {"initial": 2.0**16}, None),
        ("bf16", {"initial": 2.0**15}, "optimizer.loss_scale.initial = 32768: model.dtype = bf16 has no loss scale"),
        ("fp32", {"growth_interval": 7}, "optimizer.loss_scale.growth_interval = 7: model.dtype = fp32"),
    ],
)
def test_settings(tmp_path, dtype, loss_scale, told):
    config = actor_config(tmp_path, dtype=dtype, optimizer={"loss_scale": loss_scale})
    found = settings_problems(config)
    assert found == [] if told is None else any(told in problem for problem in found), found


@pytest.mark.parametrize("value", [3.0, 0.0, -2.0, 2.0**33])
def test_a_scale_is_a_power_of_two(tmp_path, value):
    with pytest.raises(ValueError, match="loss_scale"):
        actor_config(tmp_path, dtype="fp16", optimizer={"loss_scale": {"initial": value}})


@pytest.mark.parametrize(
    ("trainer", "engine", "tolerance"),
    [
        ("fp32", "fp32", 1e-4),
        ("fp32", "fp16", 0.05),
        ("fp16", "fp16", 0.05),
        ("fp16", "bf16", 0.3),
        ("bf16", "fp32", 0.3),
    ],
)
def test_the_tolerance_of_the_weight_check_follows_the_coarser_dtype(tmp_path, trainer, engine, tolerance):
    config: Config = actor_config(tmp_path, dtype=trainer, sections={"engine": {"dtype": engine}})
    assert config.probe_tolerance == tolerance
