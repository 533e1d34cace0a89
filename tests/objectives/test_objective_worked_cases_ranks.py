"""The worked cases through token_statistics: logits in shards over gloo ranks, back to each shard's gradient."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dppo_megatron.objectives import TopKLogprobs, build_objective
from tests.objectives.worked_cases import CASES, RUNS, close
from tests.support.ranks import TORCH, Ranks

Result = dict[tuple[str, str, str], dict[str, Tensor]]  # (case, loss, value) -> what one rank found
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


def worked_cases_on_a_shard(rank: int, world: int, dtype: str) -> Result:
    """Every case by every method on this rank's columns, the vocabulary padded to a multiple of the ranks."""
    return {(name, run[0], run[3]): _run(name, run, rank, world, DTYPES[dtype]) for name in CASES for run in RUNS}


def _run(name: str, run: tuple, rank: int, world: int, dtype: torch.dtype) -> dict[str, Tensor]:
    from dppo_megatron.vocab_parallel import token_statistics

    _, preset, overrides, _ = run
    given = CASES[name]["inputs"]
    mu = torch.tensor([given["mu"]], dtype=torch.float64).log()
    vocab = mu.shape[1]
    width = -(-vocab // world)
    # Padding columns hold what would be the most likely token if anything read them.
    whole = torch.full((1, width * world), 50.0, dtype=torch.float64)
    whole[:, :vocab] = torch.tensor([given["logits_pi"]], dtype=torch.float64)
    shard = whole[:, rank * width : (rank + 1) * width].to(dtype).requires_grad_()
    sampled, ids = torch.tensor([given["sampled"]]), mu.topk(given["cfg"]["K"], dim=1).indices
    group = dist.group.WORLD if world > 1 else None
    stats = token_statistics(shard, sampled, ids, vocab, group=group)
    out = build_objective(preset, **overrides)(
        logprob=stats.logprob,
        mask=torch.ones(1, dtype=torch.bool),
        rollout_logprob=mu.gather(1, sampled[:, None])[:, 0].to(dtype),
        advantage=torch.tensor([given["advantage"]], dtype=dtype),
        topk=TopKLogprobs(ids, mu.gather(1, ids).to(dtype), stats.topk_logprob, stats.other_logprob, sampled, vocab),
    )
    out.loss.sum().backward()
    return {
        "loss": out.loss.detach(),
        "weight": out.weight,
        "masked": out.masked_tokens,
        "divergence": out.divergence,
        "gradient": shard.grad,
    }


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def found(request: pytest.FixtureRequest) -> Iterator[dict[str, list[Result]]]:
    """dtype -> the results of each rank."""
    if request.param == 1:
        yield {dtype: [worked_cases_on_a_shard(0, 1, dtype)] for dtype in DTYPES}
        return
    with Ranks(request.param, "gloo", TORCH) as ranks:
        yield {dtype: ranks.run(worked_cases_on_a_shard, world=request.param, dtype=dtype) for dtype in DTYPES}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case_name", CASES)
@pytest.mark.parametrize(("loss", "preset", "overrides", "value"), RUNS, ids=[f"{r[0]}-{r[3]}" for r in RUNS])
def test_worked_case_through_token_statistics(found, loss, preset, overrides, value, case_name, dtype):
    expected = CASES[case_name]["expected"]["losses"][loss]
    vocab = len(CASES[case_name]["inputs"]["mu"])
    ranks = [result[case_name, loss, value] for result in found[dtype]]
    for rank in ranks:
        close(rank["weight"], [expected["weight"]], DTYPES[dtype])
        close(rank["loss"], [expected[value]], DTYPES[dtype])
        if "mask" in expected:
            assert rank["masked"].tolist() == [expected["mask"] == 0.0]
        if "divergence" in expected:
            close(rank["divergence"], [expected["divergence"]], DTYPES[dtype])
    gradient = torch.cat([rank["gradient"] for rank in ranks], dim=1)[0]
    close(gradient[:vocab], expected["grad_logits"], DTYPES[dtype])
    assert not gradient[vocab:].any()
