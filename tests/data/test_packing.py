import dataclasses
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dppo_megatron.data.micro_batches import Prefixes, computed_rows, plan_micro_batches
from dppo_megatron.data.packing import TokenSequence, pack
from dppo_megatron.types import Prompt, Rollout
from tests.support.speed import copying_s

LENGTHS = st.lists(st.integers(1, 60), max_size=80)


@given(LENGTHS, st.integers(1, 5), st.integers(1, 100))
@settings(max_examples=300, deadline=None)
def test_plans_conserve_balance_and_repeat(lengths, ranks, budget):
    plan = plan_micro_batches(lengths, ranks, budget)
    assert sorted(i for rank in plan for part in rank for i in part) == list(range(len(lengths)))
    assert len(plan) == ranks
    assert len({len(rank) for rank in plan}) == 1
    assert len(plan[0]) >= 1
    for rank in plan:
        totals = [sum(lengths[i] for i in part) for part in rank]
        assert totals == sorted(totals, reverse=True)
        for part, total in zip(rank, totals, strict=True):
            assert total <= budget or len(part) == 1
            assert part == sorted(part)
    loads = [sum(lengths[i] for part in rank for i in part) for rank in plan]
    assert max(loads) - min(loads) <= max(lengths, default=0)
    assert plan == plan_micro_batches(np.array(lengths, dtype=np.int32), ranks, budget)


@given(LENGTHS, st.integers(1, 5), st.integers(120, 400))
@settings(max_examples=100, deadline=None)
def test_plans_use_few_micro_batches(lengths, ranks, budget):
    # Sequences of at most half a budget: a bin is only refused one when it is more than half full.
    plan = plan_micro_batches(lengths, ranks, budget)
    assert len(plan[0]) <= -(-2 * sum(lengths) // budget) // ranks + 1


GROUPS = st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(1, 40), min_size=1, max_size=8)), max_size=12)


@given(GROUPS, st.integers(1, 4), st.integers(1, 200))
@settings(max_examples=200, deadline=None)
def test_plans_of_groups_conserve_and_compute_no_more(groups, ranks, budget):
    lengths = np.array([prompt + n for prompt, responses in groups for n in responses], dtype=np.int64)
    prefixes = Prefixes(
        np.array([g for g, (_, responses) in enumerate(groups) for _ in responses], dtype=np.int64),
        np.array([prompt for prompt, responses in groups for _ in responses], dtype=np.int64),
    )
    plan = plan_micro_batches(lengths, ranks, budget, prefixes)
    assert sorted(i for rank in plan for part in rank for i in part) == list(range(len(lengths)))
    assert len(plan) == ranks
    assert len({len(rank) for rank in plan}) == 1
    for part in (part for rank in plan for part in rank):
        assert part == sorted(part)
        assert computed_rows(part, lengths, prefixes) <= budget or len(part) == 1

    def longest(plan) -> int:
        return sum(max(computed_rows(part, lengths, prefixes) for part in parts) for parts in zip(*plan, strict=True))

    assert longest(plan) <= longest(plan_micro_batches(lengths, ranks, budget))
    assert plan == plan_micro_batches(lengths, ranks, budget, prefixes)


def test_groups_are_kept_together_where_that_saves_and_not_where_ranks_would_wait():
    def plan(prompt: int, responses: list[list[int]], ranks: int, budget: int):
        lengths = np.array([prompt + n for of in responses for n in of])
        groups = np.array([g for g, of in enumerate(responses) for _ in of])
        return plan_micro_batches(lengths, ranks, budget, Prefixes(groups, np.full(len(lengths), prompt)))

    # Four samples of two long prompts: one micro-batch a prompt.
    assert plan(100, [[5] * 4, [5] * 4], 1, 120) == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    # One long group, one short: two ranks share both.
    long, short = plan(1, [[100] * 4, [10] * 4], 2, 1000)
    assert len([i for i in long[0] if i < 4]) == len([i for i in short[0] if i < 4]) == 2


def test_plan_edge_cases():
    assert plan_micro_batches([], 2, 10) == [[[]], [[]]]
    assert plan_micro_batches([5], 2, 10) == [[[0]], [[]]]
    assert plan_micro_batches([50, 3, 3], 1, 10) == [[[0], [1, 2]]]
    assert plan_micro_batches([4, 4, 4, 4], 2, 8) == [[[0, 2]], [[1, 3]]]
    nothing = np.array([], dtype=np.int64)
    assert plan_micro_batches([], 2, 10, Prefixes(nothing, nothing)) == [[[]], [[]]]
    for bad in (([1], 0, 10), ([1], 1, 0), ([0], 1, 10)):
        with pytest.raises(ValueError, match="at least 1"):
            plan_micro_batches(*bad)


def sequence(rng, prompt, response, *, topk=0, weight=0.25, advantage=0.5) -> TokenSequence:
    return TokenSequence.from_rollout(
        Prompt(0, 0, rng.integers(1, 100, prompt).astype(np.int32), "", ""),
        Rollout(
            rng.integers(1, 100, response).astype(np.int32),
            -rng.random(response).astype(np.float32),
            np.zeros(response, np.int32),
            "stop",
            rng.integers(0, 100, (response, topk)).astype(np.int32) if topk else None,
            -rng.random((response, topk)).astype(np.float32) if topk else None,
        ),
        advantage=advantage,
        loss_weight=weight,
        temperature=0.5,
    )


def with_columns(s: TokenSequence, **columns) -> TokenSequence:
    """A column of None is left out."""
    found = {name: array for name, array in (s.columns | columns).items() if array is not None}
    return dataclasses.replace(s, columns=found)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 8)), min_size=1, max_size=12), st.sampled_from([0, 3]))
@settings(max_examples=150, deadline=None)
def test_packing_agrees_with_the_definition(shapes, topk):
    rng = np.random.default_rng(0)
    sequences = [sequence(rng, p, r, topk=topk, weight=0.1 * (i + 1)) for i, (p, r) in enumerate(shapes)]
    packed = pack(sequences)
    batch = SimpleNamespace(topk_ids=None)
    vars(batch).update({name: tensor.numpy() for name, tensor in packed.tensors.items()})
    assert len(batch.token_ids) == sum(len(s) for s in sequences)
    assert batch.cu_seqlens.tolist() == np.cumsum([0] + [len(s) for s in sequences]).tolist()
    assert batch.mask.sum() == sum(len(s.response_ids) for s in sequences)
    row = 0
    for s in sequences:
        whole = np.concatenate([s.prompt_ids, s.response_ids])
        for t, token in enumerate(whole):
            assert batch.token_ids[row] == token
            assert batch.position_ids[row] == t
            assert batch.temperature[row] == 0.5
            j = t + 1 - len(s.prompt_ids)  # response token that this row predicts
            learns = 0 <= j < len(s.response_ids)
            assert batch.mask[row] == learns
            assert batch.target_ids[row] == (whole[t + 1] if learns else 0)
            assert batch.loss_weight[row] == (np.float32(s.loss_weight) if learns else 0)
            assert batch.advantage[row] == (0.5 if learns else 0)
            assert batch.rollout_logprob[row] == (s.columns["rollout_logprob"][j] if learns else 0)
            if topk:
                np.testing.assert_array_equal(batch.topk_ids[row], s.columns["topk_ids"][j] if learns else [-1] * topk)
                np.testing.assert_array_equal(
                    batch.rollout_topk_logprob[row], s.columns["rollout_topk_logprob"][j] if learns else [0] * topk
                )
            row += 1
    assert (batch.topk_ids is None) == (topk == 0)


def test_dtypes():
    batch = pack([sequence(np.random.default_rng(0), 2, 3, topk=2)])
    assert {name: getattr(batch, name).dtype for name in ("token_ids", "position_ids", "target_ids")} == {
        "token_ids": torch.int64,
        "position_ids": torch.int64,
        "target_ids": torch.int64,
    }
    assert batch.cu_seqlens.dtype == batch.topk_ids.dtype == torch.int32
    assert batch.mask.dtype == torch.bool
    for name in ("loss_weight", "advantage", "rollout_logprob", "temperature", "rollout_topk_logprob"):
        assert getattr(batch, name).dtype == torch.float32


def test_supervised_sequences_have_no_rollout_fields():
    prompt = Prompt(0, 0, np.array([7, 8], np.int32), "", "")
    batch = pack([TokenSequence.from_answer(prompt, np.array([9, 1], np.int32), loss_weight=0.5)])
    assert batch.target_ids.tolist() == [0, 9, 1, 0]
    assert batch.mask.tolist() == [False, True, True, False]
    assert batch.loss_weight.tolist() == [0, 0.5, 0.5, 0]
    for name in ("advantage", "rollout_logprob", "temperature", "topk_ids", "rollout_topk_logprob"):
        assert getattr(batch, name) is None


def test_a_sequence_without_weight_is_masked():
    rng = np.random.default_rng(0)
    batch = pack([sequence(rng, 2, 3, weight=0.0), sequence(rng, 2, 3)])
    assert batch.mask.tolist() == [False] * 5 + [False, True, True, True, False]
    assert not batch.target_ids[:5].any()


def test_advantages_may_differ_by_token():
    rng = np.random.default_rng(0)
    per_token = np.array([1, 2, 3], np.float32)
    batch = pack([sequence(rng, 1, 3, advantage=per_token), sequence(rng, 1, 2, advantage=-1.0)])
    assert batch.advantage.tolist() == [1, 2, 3, 0, -1, -1, 0]


@pytest.mark.parametrize("topk", [0, 4])
def test_a_filler_carries_no_loss(topk):
    batch = pack([], like={"topk_ids": (topk,), "rollout_topk_logprob": (topk,)} if topk else None)
    assert len(batch.token_ids) == 1
    assert batch.cu_seqlens.tolist() == [0, 1]
    assert not batch.mask.any()
    assert not batch.loss_weight.any()
    assert (batch.topk_ids is None) if topk == 0 else (batch.topk_ids.tolist() == [[-1] * 4])
    assert batch.rollout_logprob.shape == (1,)


def test_routed_experts_lie_at_the_tokens_that_were_read():
    rng = np.random.default_rng(0)
    routed = [np.arange(n * 6, dtype=np.uint16).reshape(n, 3, 2) for n in (4, 7)]
    sequences = [
        with_columns(sequence(rng, 2, len(r) - 1), routed_experts=r) for r in routed
    ]  # P + R - 1 rows: nothing was read after the last token
    batch = pack(sequences)
    assert batch.routed_experts.dtype == torch.int16
    assert batch.routed_experts.shape == (13, 3, 2)
    np.testing.assert_array_equal(batch.routed_experts[:4], routed[0])
    np.testing.assert_array_equal(batch.routed_experts[5:12], routed[1])
    assert (batch.routed_experts[[4, 12]] == -1).all()
    for invalid in (routed[1][1:], routed[1][:, 1:], None):
        with pytest.raises(ValueError, match=r"sequence 1: routed_experts (is|must be present)"):
            pack([sequences[0], with_columns(sequences[1], routed_experts=invalid)])
    assert pack(sequences[:1]).routed_experts is not None
    assert pack([sequence(rng, 2, 3)]).routed_experts is None


def test_sampling_masks_lie_at_the_rows_that_predict():
    rng = np.random.default_rng(0)
    counts = [np.array(c, np.int32) for c in ([2, 1], [3], [1, 2, 1])]
    sequences = [
        with_columns(
            sequence(rng, 2, len(c), weight=weight),
            sampling_mask_ids=np.arange(c.sum(), dtype=np.int32) + 10 * i,
            sampling_mask_counts=c,
        )
        for i, (c, weight) in enumerate(zip(counts, (0.5, 0.0, 0.25), strict=True))
    ]
    batch = pack(sequences)
    assert batch.sampling_mask_counts.tolist() == [0, 2, 1, 0, 0, 0, 0, 0, 1, 2, 1, 0]  # nothing where no loss is
    assert batch.sampling_mask_ids.tolist() == [0, 1, 2, 20, 21, 22, 23]
    part = dataclasses.replace(
        sequences[2], response_ids=np.arange(5, dtype=np.int32), sampled=np.array([True, False, False, True, True])
    )
    batch = pack([part])  # two tokens of the environment among those of the policy
    assert batch.sampling_mask_counts.tolist() == [0, 1, 0, 0, 2, 1, 0]
    assert batch.sampling_mask_ids.tolist() == [20, 21, 22, 23]
    with pytest.raises(ValueError, match="sequence 1: sampling_mask_counts, sampling_mask_ids must be present"):
        pack([sequences[0], sequence(rng, 2, 3)])
    with pytest.raises(ValueError, match=r"sequence 0: sampling_mask_ids is \[2\], expected \[3\]"):
        pack([with_columns(sequences[0], sampling_mask_ids=sequences[0].columns["sampling_mask_ids"][:2])])


def test_sequences_that_do_not_fit_together_are_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="sequence 1: rollout_topk_logprob, topk_ids must be present in all"):
        pack([sequence(rng, 2, 3), sequence(rng, 2, 3, topk=2)])
    with pytest.raises(ValueError, match="sequence 0: empty prompt"):
        pack([sequence(rng, 0, 3)])
    plain = sequence(rng, 2, 3)
    with pytest.raises(ValueError, match=r"sequence 0: rollout_logprob is \[2\], expected \[3\]"):
        pack([with_columns(plain, rollout_logprob=plain.columns["rollout_logprob"][:2])])
    for wrong in (dataclasses.replace(plain, advantage=None), with_columns(plain, rollout_logprob=None)):
        with pytest.raises(ValueError, match="sequence 0: a rollout needs an advantage and one log-prob per"):
            pack([wrong])
    with pytest.raises(ValueError, match="sequence 0: unknown is no column"):
        pack([with_columns(plain, unknown=plain.columns["rollout_logprob"])])
    with pytest.raises(ValueError, match="sequence 0: loss_weight = nan: not finite"):
        pack([sequence(rng, 2, 3, weight=float("nan"))])


@pytest.mark.parametrize(("topk", "limit"), [(0, 4.5), (20, 6.0)])
def test_a_thousand_short_sequences_pack_fast(topk, limit):
    rng = np.random.default_rng(0)
    sequences = [sequence(rng, 6, int(rng.integers(1, 20)), topk=topk) for _ in range(1024)]

    def seconds() -> float:
        start = time.process_time()
        (parts,) = plan_micro_batches([len(s) for s in sequences], 1, 8192)
        for part in parts:
            pack([sequences[i] for i in part])
        return time.process_time() - start

    assert min(seconds() for _ in range(10)) < limit * copying_s()
