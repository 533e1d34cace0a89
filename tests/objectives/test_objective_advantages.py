"""Group advantages and the weights of aggregation."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dppo_megatron import objectives

REWARDS = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0], [0.1, 0.1, 0.1, 0.1]], dtype=torch.float64)


OF_GROUPS = [kind for kind in objectives.ADVANTAGE_KINDS if kind != "batch_mean"]


def test_kinds_by_their_formulas():
    centred = REWARDS - REWARDS.mean(1, keepdim=True)
    centred[2] = 0
    expected = {
        "group_mean": centred,
        "group_mean_std": centred / REWARDS.std(1, keepdim=True).clamp(min=1e-3),
        "leave_one_out": REWARDS - (REWARDS.sum(1, keepdim=True) - REWARDS) / 3,
        "batch_normalised": centred / centred.std(),
        "batch_mean": REWARDS - REWARDS.mean(),
    }
    assert set(expected) == set(objectives.ADVANTAGE_KINDS)
    for kind, wanted in expected.items():
        torch.testing.assert_close(objectives.group_advantages(REWARDS, kind=kind), wanted, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kind", OF_GROUPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_group_without_signal_gets_exactly_zero(kind, dtype):
    rewards = REWARDS.to(dtype)
    out = objectives.group_advantages(rewards, kind=kind)
    assert out.dtype == dtype
    assert (out[2] == 0).all()
    assert (out[:2] != 0).all()
    assert (objectives.group_advantages(rewards[2:], kind=kind) == 0).all()
    for n in range(2, 20):  # sums of these round, and so do their means
        equal = torch.tensor([0.1, 0.7, 1 / 3], dtype=dtype)[:, None].expand(3, n)
        assert (objectives.group_advantages(equal, kind=kind) == 0).all()
    assert objectives.group_has_signal(rewards).tolist() == [True, True, False]


@pytest.mark.parametrize("kind", OF_GROUPS)
def test_failed_samples_leave_the_statistics(kind):
    valid = torch.tensor([[True, True, False, True], [False, False, False, True], [False] * 4])
    corrupted = torch.where(valid, REWARDS, torch.nan)
    out = objectives.group_advantages(corrupted, valid, kind)
    assert (out[~valid] == 0).all()
    assert (out[1:] == 0).all(), "a lone sample has no baseline"
    expected = objectives.group_advantages(REWARDS[:1, [0, 1, 3]], kind=kind)[0]
    if kind == "batch_normalised":  # the lone sample is a valid zero of the batch's spread
        centred = torch.tensor([2, -4, 2, 0], dtype=torch.float64) / 6
        expected = centred[:3] / centred.std()
    torch.testing.assert_close(out[0, [0, 1, 3]], expected.abs() * (REWARDS[0, [0, 1, 3]] * 2 - 1))
    assert objectives.group_has_signal(corrupted, valid).tolist() == [True, False, False]


def test_batch_mean_takes_failed_samples_out_and_needs_no_signal_in_a_group():
    valid = torch.tensor([[True, True, False, True], [True] * 4, [True] * 4])
    out = objectives.group_advantages(torch.where(valid, REWARDS, torch.nan), valid, "batch_mean")
    torch.testing.assert_close(out[valid], REWARDS[valid] - REWARDS[valid].mean())
    assert out[0, 2] == 0
    assert (out[2] != 0).all()
    assert (objectives.group_advantages(torch.full((2, 3), 0.1), kind="batch_mean") == 0).all()


def test_batch_normalised_over_ranks_equals_the_whole():
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    parts = rewards[:3], rewards[3:]
    moments = objectives.reward_moments(parts[0]) + objectives.reward_moments(parts[1])
    split = [objectives.group_advantages(part, kind="batch_normalised", moments=moments) for part in parts]
    torch.testing.assert_close(torch.cat(split), objectives.group_advantages(rewards, kind="batch_normalised"))


@settings(max_examples=30, deadline=None)
@given(
    rewards=st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=8),
    shift=st.floats(-5, 5),
    scale=st.floats(0.1, 10),
)
def test_shift_and_scale(rewards, shift, scale):
    group = torch.tensor([rewards], dtype=torch.float64)
    for kind in ("group_mean", "group_mean_std", "leave_one_out"):
        out = objectives.group_advantages(group, kind=kind)
        assert out.sum().abs() < 1e-8
        if not (group.max() - group.min() > 1e-3):
            continue
        torch.testing.assert_close(objectives.group_advantages(group + shift, kind=kind), out, atol=1e-6, rtol=1e-6)
        scaled = out if kind == "group_mean_std" else scale * out
        torch.testing.assert_close(objectives.group_advantages(scale * group, kind=kind), scaled, atol=1e-6, rtol=1e-6)


def test_refusals():
    with pytest.raises(objectives.ObjectiveError, match="did you mean 'group_mean'"):
        objectives.group_advantages(REWARDS, kind="group_men")
    with pytest.raises(objectives.ObjectiveError, match=r"rewards must be \[G, n\]"):
        objectives.group_advantages(REWARDS[0])
    with pytest.raises(objectives.ObjectiveError, match="valid has shape"):
        objectives.group_advantages(REWARDS, torch.ones(2, 2))
    with pytest.raises(objectives.ObjectiveError, match="did you mean 'token_mean'"):
        objectives.sequence_weights("tokn_mean", torch.tensor([1]))
    with pytest.raises(objectives.ObjectiveError, match="needs a horizon"):
        objectives.sequence_weights("seq_mean_token_sum_norm", torch.tensor([1]))


def test_sequences_without_loss_count_nowhere():
    lengths = torch.tensor([2, 0, 4])
    expected = {
        "token_mean": [1 / 6, 0, 1 / 6],
        "seq_mean_token_mean": [1 / 4, 0, 1 / 8],
        "seq_mean_token_sum_norm": [1 / 20, 0, 1 / 20],
        "seq_mean_token_sum": [1 / 2, 0, 1 / 2],
    }
    for kind, wanted in expected.items():
        torch.testing.assert_close(objectives.sequence_weights(kind, lengths, horizon=10), torch.tensor(wanted))
    assert objectives.sequence_weights("token_mean", torch.tensor([0, 0])).tolist() == [0, 0]


# Trajectories of three turns, two (one has a reward; at the end the trajectory has one more), and one.
TURN_REWARDS = torch.tensor([[[1.0, 0.0, 2.0], [0.0, 1.0, 9.0], [4.0, 9.0, 9.0]]], dtype=torch.float64)
TURNS = torch.tensor([[3, 2, 1]])
OF_TRAJECTORIES = torch.tensor([[3.0, 2.0, 4.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # Returns at a discount of 1/2: 1.5, 1, 2; 1, 2; 4. The last turn of the first has nothing to be compared with.
        ("group_mean", [[-2 / 3, -1 / 2, -2 / 3], [-7 / 6, 1 / 2, 0], [11 / 6, 0, 0]]),
        ("leave_one_out", [[-1, -1, -1], [-7 / 4, 1, 0], [11 / 4, 0, 0]]),
        ("group_mean_std", [[-0.414781, -0.707107, -0.414781], [-0.725866, 0.707107, 0], [1.140647, 0, 0]]),
    ],
)
def test_turns_are_compared_with_those_of_the_same_number(kind, expected):
    found = objectives.turn_advantages(OF_TRAJECTORIES, TURN_REWARDS, TURNS, None, kind, 0.5)
    torch.testing.assert_close(found, torch.tensor([expected], dtype=torch.float64), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", ["group_mean", "group_mean_std", "leave_one_out"])
def test_without_a_discount_the_first_turn_has_the_trajectorys_advantage(kind):
    generator = torch.Generator().manual_seed(1)
    rewards = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    turn_rewards = torch.randn(5, 4, 6, generator=generator, dtype=torch.float64)
    turns = torch.randint(0, 7, (5, 4), generator=generator)
    valid = torch.rand(5, 4, generator=generator) < 0.8
    corrupted = torch.where(valid, rewards, torch.nan)
    found = objectives.turn_advantages(corrupted, turn_rewards, turns, valid, kind)
    of_trajectories = objectives.group_advantages(rewards, valid, kind)
    torch.testing.assert_close(found[:, :, 0], of_trajectories)
    assert (found[~valid] == 0).all()
    unrewarded = turns == 0  # these are credited as a whole
    torch.testing.assert_close(found[unrewarded], of_trajectories[unrewarded][:, None].expand(-1, 6))
    for g in range(5):
        for k in range(6):
            reached = valid[g] & (turns[g] > k)
            assert (found[g, ~reached & ~unrewarded[g], k] == 0).all()
            if k and reached.sum() > 1:
                returns = torch.stack([rewards[g, i] - turn_rewards[g, i, :k].sum() for i in reached.nonzero()[:, 0]])
                torch.testing.assert_close(
                    found[g, reached, k], objectives.group_advantages(returns[None], kind=kind)[0]
                )


def test_returns_that_only_rounding_tells_apart_give_no_advantage():
    """Equal sums, earned in different turns: the quotient by their spread would make 1 of 1e-8."""
    turn_rewards = torch.tensor([[[0.1, 0.2, 0.3], [0.3, 0.3, 0.0], [0.2, 0.1, 0.3]]], dtype=torch.float32)
    rewards = torch.full((1, 3), 0.1 + 0.2 + 0.3)
    found = objectives.turn_advantages(rewards, turn_rewards, torch.full((1, 3), 3), None, "group_mean_std")
    assert (found[0, :, 0] == 0).all()
    assert found[0, :, 1].sign().tolist() == [1.0, -1.0, 1.0]
    assert found[0, 1, 2] < 0 < found[0, 0, 2] == found[0, 2, 2]


@pytest.mark.parametrize("kind", OF_GROUPS)
@pytest.mark.parametrize(("scale", "signal"), [(2**-17, False), (2**-14, True)], ids=["rounding", "difference"])
@pytest.mark.parametrize("largest", [1.0, -3e4])
def test_rewards_that_only_rounding_tells_apart_are_equal(kind, scale, signal, largest):
    """As a reward model gives them, whose last bits depend on its batch."""
    rewards = largest * (1 - scale * torch.tensor([[0.0, 0.3, 1.0, 0.0]], dtype=torch.float64))
    assert (
        bool(objectives.group_advantages(rewards, kind=kind).any())
        == signal
        == objectives.group_has_signal(rewards).item()
    )


def test_baselines_of_the_batch_are_none_of_turns():
    for kind in ("batch_mean", "batch_normalised"):
        with pytest.raises(objectives.ObjectiveError, match="compares over the batch, but turns compare in groups"):
            objectives.turn_advantages(OF_TRAJECTORIES, TURN_REWARDS, TURNS, None, kind)
