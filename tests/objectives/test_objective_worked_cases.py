"""The worked cases of objective_vectors.json: divergence, mask, weight, loss, gradient into the logits."""

from __future__ import annotations

import pytest
import torch

from dppo_megatron.objectives import BatchCounts, build_objective, sequence_weights
from tests.objectives.cases import make_case
from tests.objectives.worked_cases import CASES, METHODS, NOT_THE_PAPER, RUNS, VECTORS, close


def build(case: dict, k: int, dtype: torch.dtype):
    given = case["inputs"]
    return make_case(
        torch.tensor([given["mu"]], dtype=torch.float64).log(),
        torch.tensor([given["logits_pi"]], dtype=torch.float64),
        torch.tensor([given["sampled"]]),
        torch.tensor([given["advantage"]]),
        k,
        dtype=dtype,
    )


def test_every_worked_loss_is_covered():
    for case in CASES.values():
        assert set(case["expected"]["losses"]) == set(METHODS) | NOT_THE_PAPER


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("case_name", CASES)
@pytest.mark.parametrize(("loss", "preset", "overrides", "value"), RUNS, ids=[f"{r[0]}-{r[3]}" for r in RUNS])
def test_loss_weight_mask_divergence_and_gradient(loss, preset, overrides, value, case_name, dtype):
    case, expected = CASES[case_name], CASES[case_name]["expected"]["losses"][loss]
    built = build(case, case["inputs"]["cfg"]["K"], dtype)
    out = build_objective(preset, **overrides)(**built.call)
    out.loss.sum().backward()

    close(out.weight, [expected["weight"]], dtype)
    close(out.loss.detach(), [expected[value]], dtype)
    close(built.logits.grad[0], expected["grad_logits"], dtype)
    if "mask" in expected:
        assert out.masked_tokens.tolist() == [expected["mask"] == 0.0]
    if "divergence" in expected:
        close(out.divergence, [expected["divergence"]], dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("case_name", CASES)
@pytest.mark.parametrize("k", [2, 3, 4])
def test_divergences_of_every_list_length(k, case_name, dtype):
    case, expected = CASES[case_name], CASES[case_name]["expected"]
    if k > len(case["inputs"]["mu"]):
        pytest.skip("list longer than the vocabulary")
    built = build(case, k, dtype)
    union = expected["topk"][str(k)]["paper_union"]
    wanted = {
        "dppo_binary_tv": expected["binary"]["tv"],
        "dppo_binary_kl": expected["binary"]["kl"],
        "dppo_topk_tv": union["tv"],
        "dppo_topk_kl": union["kl"],
    }
    for preset, number in wanted.items():
        close(build_objective(preset)(**built.call).divergence, [number], dtype)


@pytest.mark.parametrize("case_name", CASES)
def test_predictive_direction(case_name):
    """Masked exactly where D > delta and A times the predicted change is positive, for either tail."""
    from dppo_megatron.objectives.divergence import predicted_change
    from dppo_megatron.objectives.inputs import check_and_clean, make_buckets

    case, expected = CASES[case_name], CASES[case_name]["expected"]
    k = case["inputs"]["cfg"]["K"]
    built = build(case, k, torch.float64)
    for tail in ("aggregated", "uniform"):
        objective = build_objective("dppo_predictive", tail=tail)
        call = {name: value for name, value in built.call.items() if name != "topk"}
        tokens = check_and_clean(objective, **call)
        change = predicted_change(make_buckets(objective, tokens, built.topk), tail)
        wanted = expected["predictive_dotD_union_K"][f"{tail}_tail"]
        close(change, [wanted], torch.float64)
        far = expected["topk"][str(k)]["paper_union"]["tv"] > 0.15
        masked = objective(**built.call).masked_tokens.item()
        assert masked == (far and case["inputs"]["advantage"] * wanted > 0)


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("token_mean", "token-mean"),
        ("seq_mean_token_sum", "seq-mean-token-sum"),
        ("seq_mean_token_mean", "seq-mean-token-mean"),
        (
            "seq_mean_token_sum_norm",
            "seq-mean-token-sum-norm (verl/DRPO: sum / horizon, mean over sequences)",
        ),
    ],
)
def test_aggregation(kind, key):
    given = VECTORS["aggregation"]
    mask = torch.tensor(given["mask"]).bool()
    loss = torch.tensor(given["token_loss"], dtype=torch.float64)[mask]
    lengths = mask.sum(1)
    weights = sequence_weights(kind, lengths, given["horizon"]).repeat_interleave(lengths)
    assert (weights * loss).sum().item() == pytest.approx(given["expected"][key], abs=1e-6)

    # Two ranks with one sequence each, sharing their counts.
    shares = [BatchCounts.of(lengths[i : i + 1]) for i in range(2)]
    total = BatchCounts.from_tensor(shares[0].to_tensor() + shares[1].to_tensor())
    assert total == shares[0] + shares[1]
    parts = [sequence_weights(kind, lengths[i : i + 1], given["horizon"], total) for i in range(2)]
    assert torch.equal(torch.cat(parts).repeat_interleave(lengths), weights)
