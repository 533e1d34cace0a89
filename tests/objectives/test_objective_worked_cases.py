"""The worked cases of objective_vectors.json: divergences, directions, aggregations.

`test_objective_worked_cases_ranks.py` compares loss, weight, mask and gradient of every method.
"""

import pytest
import torch

from dppo_megatron.objectives import build_objective, sequence_weights
from tests.objectives.cases import make_case
from tests.objectives.worked_cases import CASES, METHODS, NOT_THE_PAPER, VECTORS, close


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
        ("seq_mean_token_sum_norm", "seq-mean-token-sum-norm (verl/DRPO: sum / horizon, mean over sequences)"),
    ],
)
def test_aggregation(kind, key):
    given = VECTORS["aggregation"]
    mask = torch.tensor(given["mask"]).bool()
    loss = torch.tensor(given["token_loss"], dtype=torch.float64)[mask]
    lengths = mask.sum(1)
    weights = sequence_weights(kind, lengths, given["horizon"]).repeat_interleave(lengths)
    assert (weights * loss).sum().item() == pytest.approx(given["expected"][key], abs=1e-6)
