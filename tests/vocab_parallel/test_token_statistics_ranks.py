"""token_statistics over 2 and 4 gloo ranks against the float64 full-vocabulary reference."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.ranks import RankError, Ranks
from tests.support.shards import shard_case
from tests.support.statistics_reference import Case, assert_close_to_reference, cases, make_inputs, reference

EVEN = Case(seed=1, tokens=13, columns=(20, 20), vocab=37, topk=5)


def over(case: Case, world: int) -> Case:
    return replace(case, columns=case.columns[:1] * world, vocab=case.columns[0] * world - 3)


def check(ranks: Ranks, case: Case, **options: Any) -> list[dict[str, Any]]:
    results = ranks.run(shard_case, case=case, **options)
    gradient = torch.cat([result["gradient"] for result in results], dim=1)
    assert_close_to_reference(case, reference(case, make_inputs(case)), results[0]["values"], gradient)
    for result in results:
        assert not result["nonfinite"].any()
        for name, value in result["values"].items():
            # torch.equal is bitwise here, there is no NaN.
            assert value is None or torch.equal(value, results[0]["values"][name]), f"{name} differs between ranks"
        assert sum(result["forward"].values()) == 1, result["forward"]
        assert result["backward"] == {}
    return results


@given(data=st.data())
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_cases(ranks: Ranks, data: st.DataObject) -> None:
    check(ranks, data.draw(cases(world=ranks.size)))


@pytest.mark.parametrize("vocab", [1, 3, 20, 21])
def test_shards_that_are_all_padding(ranks: Ranks, vocab: int) -> None:
    check(ranks, replace(over(EVEN, ranks.size), vocab=vocab))


def test_unchecked_is_the_same(ranks: Ranks) -> None:
    case = over(EVEN, ranks.size)
    checked, unchecked = check(ranks, case), check(ranks, case, check=False)
    assert torch.equal(checked[0]["gradient"], unchecked[0]["gradient"])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_many_columns(ranks: Ranks, dtype: str) -> None:
    # Sums long enough for a careless accumulation to show, over more than one eager piece.
    case = Case(seed=3, tokens=7, columns=(33000 // ranks.size,) * ranks.size, vocab=None, topk=8, dtype=dtype)
    check(ranks, case)


def _disagree(rank: int, what: str, deferred: bool) -> None:
    from dppo_megatron.vocab_parallel import DeferredChecks, token_statistics

    group, world = dist.group.WORLD, dist.get_world_size()
    target = torch.tensor([0, 1, 2])
    arguments: dict[str, Any] = {"logits": torch.randn(3, 5), "target_ids": target, "group": group}
    if what == "ids":
        arguments["target_ids"] = target + rank
    elif what == "starts":
        arguments["vocab_start"] = 4 * rank
    elif what == "sizes":
        arguments["logits"] = torch.randn(3, 5 + rank)
    elif what == "vocab_size":
        arguments["vocab_size"] = 4 + rank
    elif what == "too few":
        arguments |= {"vocab_start": 5 * rank, "vocab_size": 5 * world + 1}
    elif what == "range":
        arguments["topk_ids"] = torch.full((3, 2), 5 * world)
    if not deferred:
        token_statistics(**arguments)
    checks = DeferredChecks()
    right = {"logits": torch.randn(3, 5), "target_ids": target, "group": group}
    for each in (right, arguments, right):
        token_statistics(**each, check=checks)
    checks.raise_if_failed()


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("ids", "target_ids or topk_ids differ between the ranks"),
        ("starts", "do not tile the vocabulary"),
        ("sizes", "do not tile the vocabulary"),
        ("vocab_size", "vocab_size differs between the ranks"),
        ("too few", "fewer than vocab_size="),
        ("range", "topk_ids must be within"),
    ],
)
def test_disagreement_raises_on_every_rank(ranks: Ranks, what: str, message: str, deferred: bool) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(_disagree, what=what, deferred=deferred)
    assert len(caught.value.raised) == ranks.size
    for kind, text in caught.value.raised:
        assert kind == "ValueError"
        assert message in text


def _with_nan(rank: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    from dppo_megatron.vocab_parallel import token_statistics

    torch.manual_seed(rank)
    logits = torch.randn(4, 6)
    if rank == 1:
        logits[2, 3] = float("nan")
    logits.requires_grad_()
    stats = token_statistics(logits, torch.tensor([0, 7, 3, 11]), group=dist.group.WORLD)
    stats.logprob.sum().backward()
    return stats.logprob.detach(), logits.grad, stats.nonfinite_rows()


def test_nan_on_one_rank_is_reported_on_all(ranks: Ranks) -> None:
    for logprob, gradient, rows in ranks.run(_with_nan):
        assert rows == [2]
        assert torch.isfinite(logprob[[0, 1, 3]]).all()
        assert torch.isfinite(gradient).all()
        assert (gradient[2] == 0).all()
        assert (gradient[[0, 1, 3]] != 0).any()
