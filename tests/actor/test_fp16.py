"""fp16 is near fp32; an overflow changes only the loss scale, on every rank, and checkpoints keep it."""

from __future__ import annotations

import pytest

from dppo_megatron.checks import settings_problems
from dppo_megatron.config.model import LARGEST
from dppo_megatron.config.schema import Config
from tests.actor.scenarios import fp16
from tests.support.actor_cases import actor_config

WORLDS = ["one_rank", pytest.param("two_ranks", marks=pytest.mark.slow)]


@pytest.fixture(params=WORLDS)
def on(request):
    return request.getfixturevalue(request.param)


def test_updates_are_near_those_of_fp32_by_any_scale(on):
    runs = on(fp16.against_fp32)
    scaled = [(layout, scale) for layout, scale in runs if isinstance(scale, float)]
    assert scaled
    for layout, scale in scaled:
        expected, got = runs[layout, "fp32"], runs[layout, scale]
        assert got["loss"][0] == pytest.approx(expected["loss"][0], abs=1e-3), layout
        assert got["grad_norm"][0] == pytest.approx(expected["grad_norm"][0], rel=5e-3), (layout, scale)
        assert got["loss"] == pytest.approx(expected["loss"], abs=5e-3), layout
        # A router that chooses another expert moves single tokens by up to a nat.
        assert (got["logprobs"] - expected["logprobs"]).abs().mean() < 0.05, layout


def test_gradients_add_up_over_micro_batches(one_rank):
    runs = one_rank(fp16.against_fp32)
    whole, parts = runs["split", 1], runs["split", 4]
    assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-4)
    assert parts["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-3)


def test_gradients_are_divided_before_they_are_clipped(one_rank):
    """The norm is far above grad_clip: a clip of the multiplied gradients would stop training."""
    runs = one_rank(fp16.against_fp32)
    clipped, free = runs["alone", 2.0**14], runs["unclipped", "fp16"]
    assert clipped["grad_norm"][0] == pytest.approx(free["grad_norm"][0], rel=1e-3)
    assert clipped["grad_norm"][0] > 2 * 0.5
    assert clipped["loss"][1] < clipped["loss"][0] - 0.1


@pytest.mark.megatron_next
def test_an_overflow_on_one_rank_is_skipped_by_all(on):
    for layout, found in on(fp16.overflows).items():
        first, second, third = found["everyone"][0]
        assert all(mine == found["everyone"][0] for mine in found["everyone"]), layout
        assert first == (False, False, 0, fp16.INITIAL), layout
        assert second == (True, True, 0, fp16.INITIAL), layout
        assert third == (False, False, 0, fp16.INITIAL / 2), layout
        assert found["unchanged"], layout
        assert found["moved"], layout


def test_the_scale_grows_and_falls_and_then_overflows_count(one_rank):
    found = one_rank(fp16.scale_follows)
    initial, smallest = fp16.INITIAL, fp16.INITIAL / 2
    assert found["grown"] == [initial, initial, 2 * initial, 2 * initial, 4 * initial]
    assert found["fallen"] == [(4 * initial, True, 0), (2 * initial, True, 0), (initial, True, 0), (smallest, False, 1)]
    assert "2 updates in a row" in found["error"]
    # No scale mends logits that are not finite.
    assert found["logits"] == (True, False, 1, initial)


def test_a_checkpoint_holds_the_scale_and_how_far_it_is_from_growing(on):
    for layout, (state, equal_bits, equal_scales) in on(fp16.resume).items():
        assert state == {"step": 2}, layout
        assert equal_scales, layout
        assert equal_bits, layout


def test_without_gradients_the_scale_stays_finite(one_rank):
    assert one_rank(fp16.scale_follows)["largest"] == [LARGEST, LARGEST / 2]


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
def test_the_weight_check_tolerates_what_the_coarser_dtype_rounds(tmp_path, trainer, engine, tolerance):
    config: Config = actor_config(tmp_path, dtype=trainer, sections={"engine": {"dtype": engine}})
    assert config.probe_tolerance == tolerance
