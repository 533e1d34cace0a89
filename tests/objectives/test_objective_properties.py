"""Properties of every method on random policies: divergences, masks, batching, numerical edges."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dppo_megatron.objectives import PRESETS, build_objective, merge_metrics, reduce_metrics, sequence_weights
from dppo_megatron.objectives.divergence import binary_kl, log1mexp
from dppo_megatron.objectives.inputs import check_and_clean
from dppo_megatron.objectives.sequences import sum_before
from tests.objectives.cases import Case, each_tensor, make_case, random_case, run

SEEDS = st.integers(0, 10_000)
MASKS_BY_SAMPLE = [
    name
    for name, preset in PRESETS.items()
    if preset.settings.control == "mask" and preset.settings.direction == "sampled"
]
TOPK_PENALTY = "experimental_topk_quadratic"


def pick(case: Case, rows: torch.Tensor, **replaced) -> dict:
    """The call of some tokens of a case; sequence ids are numbered afresh."""
    topk = each_tensor(case.topk, lambda value: value[rows])
    call = {name: value[rows] for name, value in case.call.items() if name != "topk"}
    call["sequence_ids"] = torch.unique(call["sequence_ids"], return_inverse=True)[1]
    return {**call, "topk": topk, **replaced}


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS, k=st.integers(1, 11), drift=st.floats(1e-3, 6.0))
def test_divergences_are_ordered_bounded_and_satisfy_pinsker(seed, k, drift):
    case = random_case(seed, k=k, drift=drift)
    d = {kind: run(f"dppo_{kind}", case).divergence for kind in ("binary_tv", "binary_kl", "topk_tv", "topk_kl")}
    full = random_case(seed, k=12, drift=drift)
    d |= {f"full_{kind}": run(f"dppo_topk_{kind}", full).divergence for kind in ("tv", "kl")}
    for kind in ("tv", "kl"):
        assert (d[f"binary_{kind}"] >= 0).all()
        assert (d[f"binary_{kind}"] <= d[f"topk_{kind}"] + 1e-12).all()
        assert (d[f"topk_{kind}"] <= d[f"full_{kind}"] + 1e-12).all()
    for level in ("binary", "topk", "full"):
        assert (d[f"{level}_tv"] <= (d[f"{level}_kl"] / 2).sqrt() + 1e-9).all()


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, moved=st.floats(1e-4, 2.0))
def test_topk_divergence_is_zero_iff_equal_on_the_listed_set(seed, moved):
    generator = torch.Generator().manual_seed(seed)
    mu_logits = torch.randn(4, 10, generator=generator, dtype=torch.float64)
    mu, sampled = mu_logits.log_softmax(-1), torch.randint(10, (4,), generator=generator)
    ids = mu.topk(3, dim=1).indices
    in_s = torch.zeros_like(mu, dtype=torch.bool).scatter(1, ids, True).scatter(1, sampled[:, None], True)
    # Moving mass among the unlisted tokens is invisible ...
    tail = torch.where(in_s, -torch.inf, mu + moved * torch.randn(4, 10, generator=generator))
    tail = tail.log_softmax(-1) + mu.masked_fill(in_s, -torch.inf).logsumexp(1, keepdim=True)
    hidden = make_case(mu, torch.where(in_s, mu, tail), sampled, torch.ones(4), 3)
    # ... and moving any token of S is not.
    seen = make_case(mu, mu + moved * (torch.arange(10) == sampled[:, None]), sampled, torch.ones(4), 3)
    for kind in ("tv", "kl"):
        assert (run(f"dppo_topk_{kind}", hidden).divergence < 1e-12).all()
        assert (run(f"dppo_topk_{kind}", seen).divergence > 1e-14).all()
        assert (run(f"dppo_binary_{kind}", seen).divergence > 1e-14).all()


@pytest.mark.parametrize("name", MASKS_BY_SAMPLE)
@settings(max_examples=8, deadline=None)
@given(seed=SEEDS, drift=st.floats(0.01, 5.0))
def test_converging_tokens_are_never_masked(name, seed, drift):
    case = random_case(seed, drift=drift)
    out = run(name, case, **({"dual_clip": None} if name == "ppo_dual_clip" else {}))
    ratio = (case.call["logprob"] - case.call["rollout_logprob"]).exp().detach()
    advantage = case.call["advantage"]
    converging = ((advantage > 0) & (ratio < 1)) | ((advantage < 0) & (ratio > 1)) | (advantage == 0)
    assert not out.masked_tokens[converging].any()
    assert (out.weight[converging & (advantage != 0)] > 0).all()


@pytest.mark.parametrize("name", PRESETS)
@settings(max_examples=3, deadline=None)
@given(seed=SEEDS, data=st.data())
def test_micro_batches_packing_and_ranks_change_nothing(name, seed, data):
    case = random_case(seed, tokens=14, drift=0.7)
    lengths = torch.tensor([3, 1, 5, 2, 3])
    ids = torch.arange(5).repeat_interleave(lengths)
    case.call["sequence_ids"] = ids
    objective, kind = build_objective(name), data.draw(st.sampled_from(["token_mean", "seq_mean_token_mean"]))

    whole = objective(**case.call)
    weights = sequence_weights(kind, lengths).double()[ids]
    (whole.loss * weights).sum().backward(retain_graph=True)
    expected, metrics = case.logits.grad.clone(), reduce_metrics(whole.metrics)

    case.logits.grad = None
    order = data.draw(st.permutations(range(5)))
    cut = data.draw(st.integers(1, 4))
    ranks = [order[:cut], order[cut:]]
    parts, loss = [], 0.0
    for rank in ranks:
        rows = torch.cat([torch.nonzero(ids == sequence).squeeze(1) for sequence in rank])
        out = objective(**pick(case, rows))
        share = weights[rows]
        (out.loss * share).sum().backward(retain_graph=True)
        loss += (out.loss * share).sum().item()
        parts.append(out.metrics)
    assert loss == pytest.approx((whole.loss * weights).sum().item(), rel=1e-12, abs=1e-14)
    torch.testing.assert_close(case.logits.grad, expected, rtol=1e-12, atol=1e-14)
    assert reduce_metrics(merge_metrics(parts)) == pytest.approx(metrics, rel=1e-12)


@pytest.mark.parametrize("name", PRESETS)
def test_garbage_outside_the_mask_and_in_absent_ids_reaches_nothing(name):
    """The log-probs are leaves: 0 times nan in a backward pass is nan, so a mask on the loss is not enough."""
    clean, keep, objective = random_case(12, tokens=6, drift=0.3), torch.arange(6) % 3 != 1, build_objective(name)

    def results(call: dict) -> tuple:
        own, listed = (value.detach().requires_grad_() for value in (call["logprob"], call["topk"].logprob))
        out = objective(**{**call, "logprob": own, "topk": dataclasses.replace(call["topk"], logprob=listed)})
        return out, *torch.autograd.grad(out.loss.sum(), (own, listed), allow_unused=True, materialize_grads=True)

    expected, expected_own, expected_listed = results(pick(clean, torch.nonzero(keep).squeeze(1)))
    assert expected_own.any()
    assert expected_listed.any() == objective.needs_topk_gradient

    for rubbish in (torch.nan, -torch.inf, torch.inf, 3.0):

        def corrupt(value, by=rubbish):
            return torch.where(keep if value.ndim == 1 else keep[:, None], value, by)

        topk = clean.topk
        absent, wide = torch.full((6, 2), -1), torch.full((6, 2), rubbish, dtype=torch.float64)
        dirty = dataclasses.replace(
            topk,
            ids=torch.cat([absent, torch.where(keep[:, None], topk.ids, -7)], 1),
            rollout_logprob=torch.cat([wide, corrupt(topk.rollout_logprob)], 1),
            logprob=torch.cat([wide, corrupt(topk.logprob)], 1),
            other_logprob=corrupt(topk.other_logprob),
        )
        untouched = ("topk", "mask", "sequence_ids")
        call = {key: corrupt(value) for key, value in clean.call.items() if key not in untouched}
        sequences = torch.where(keep, clean.call["sequence_ids"], -99)
        out, own, listed = results({**call, "topk": dirty, "mask": keep, "sequence_ids": sequences})
        for value in (out.loss, out.weight, out.masked_tokens, own, listed):
            assert not value[~keep].any()
        assert not listed[:, :2].any()
        torch.testing.assert_close(out.loss[keep], expected.loss, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(own[keep], expected_own, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(listed[keep, 2:], expected_listed, rtol=1e-12, atol=1e-14)
        assert reduce_metrics(out.metrics) == pytest.approx(reduce_metrics(expected.metrics), rel=1e-12)


@pytest.mark.parametrize("name", ["dppo_topk_tv", "dppo_topk_kl", "dppo_predictive", TOPK_PENALTY])
def test_the_sampled_token_counts_once_wherever_it_is_listed(name):
    case = random_case(9, tokens=40, vocab=12, k=4)
    expected = run(name, case)
    topk = case.topk
    target = topk.target_ids[:, None]
    twice = dataclasses.replace(
        topk,
        ids=torch.cat([target, topk.ids], 1),
        rollout_logprob=torch.cat([case.call["rollout_logprob"][:, None], topk.rollout_logprob], 1),
        logprob=torch.cat([case.call["logprob"][:, None], topk.logprob], 1),
    )
    inside = (topk.ids == target).any(1)
    assert inside.any()
    assert not inside.all()
    out = build_objective(name)(**{**case.call, "topk": twice})
    torch.testing.assert_close(out.divergence, expected.divergence, rtol=0, atol=1e-15)
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("kind", ["binary_tv", "binary_kl", "topk_tv", "topk_kl"])
def test_threshold_is_strict(kind):
    case = random_case(11, tokens=30)
    name = f"dppo_{kind}"
    masked = torch.nonzero(run(name, case).masked_tokens).squeeze(1)
    assert len(masked) > 0
    for place in masked[:3].tolist():
        at = run(name, case).divergence[place].item()
        assert not run(name, case, delta=at).masked_tokens[place]
        assert run(name, case, delta=at * (1 - 1e-15)).masked_tokens[place]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("dppo_binary_tv", {}),
        ("dppo_binary_tv", {"gradient_path": "logprob"}),
        ("dppo_binary_tv", {"ratio_cap": 5.0}),
        ("ppo", {}),
        ("pg_is", {"mismatch": "mask", "mismatch_high": 2.0}),
        ("spo", {"mismatch": "mask", "mismatch_high": 2.0}),
    ],
)
def test_a_token_that_is_out_stays_out_though_its_ratio_overflows(name, settings):
    """Masked, dropped, or without advantage."""
    logprob = torch.tensor([-0.1, -0.1, -1.0], requires_grad=True)
    inputs = {
        "logprob": logprob,
        "rollout_logprob": torch.tensor([-95.0, -95.0, -1.0]),
        "advantage": torch.tensor([1.0, 0.0, 1.0]),
        "mask": torch.ones(3, dtype=torch.bool),
    }
    out = build_objective(name, **settings)(**inputs)
    gradient = torch.autograd.grad(out.loss.sum(), logprob)[0]
    assert out.loss.isfinite().all()
    torch.testing.assert_close(gradient, torch.tensor([0.0, 0.0, -1.0]))
    assert out.weight[0] == 0


@pytest.mark.parametrize("name", ["aspo", "ess_adaptive", "vespo", "sapo", "maspo"])
def test_a_token_that_pi_has_left_has_a_bounded_gradient(name):
    """r so small that 1 / r overflows, and so small that r is 0."""
    logprob = torch.tensor([-90.0, -110.0, -30.0, -1.0], requires_grad=True)
    rollout_logprob = torch.full((4,), -0.5)
    out = build_objective(name)(
        logprob=logprob,
        rollout_logprob=rollout_logprob,
        old_logprob=rollout_logprob + torch.tensor([0.5, -3.0, 0.1, 0.0]),
        advantage=torch.ones(4),
        mask=torch.ones(4, dtype=torch.bool),
        sequence_ids=torch.arange(4),
    )
    gradient = torch.autograd.grad(out.loss.sum(), logprob)[0]
    assert out.loss.isfinite().all()
    assert gradient.abs().max() <= 3


@pytest.mark.parametrize("name", PRESETS)
def test_reads_no_value_on_the_host(name):
    """Meta tensors have no values: any .item(), bool(tensor) or data-dependent shape raises."""
    case = random_case(0)
    topk = each_tensor(case.topk, lambda value: value.detach().to("meta"))
    call = {key: value.detach().to("meta") for key, value in case.call.items() if key != "topk"}
    out = build_objective(name)(**call, topk=topk)
    assert out.loss.shape == out.weight.shape == (8,)


@pytest.mark.parametrize("name", PRESETS)
def test_runs_without_gradient_and_on_no_tokens(name):
    case = random_case(1)
    with torch.no_grad():
        out = run(name, case)
    assert not out.loss.requires_grad
    empty = build_objective(name)(**pick(case, torch.tensor([], dtype=torch.long)))
    assert empty.loss.shape == (0,)
    reduced = reduce_metrics(empty.metrics)
    assert reduced["train/tokens"] == 0
    assert "weight/max" not in reduced


@settings(max_examples=60, deadline=None)
@given(x=st.floats(-40, -1e-12))
def test_complement_of_a_probability_near_one(x):
    import math

    exact = math.log(-math.expm1(x)) if x > -0.7 else math.log1p(-math.exp(x))
    assert log1mexp(torch.tensor(x, dtype=torch.float64)).item() == pytest.approx(exact, rel=1e-13)


def test_binary_kl_near_probability_one_in_fp32():
    """Log-probs that round to 0, and to one step from it, give a small finite KL and no nan."""
    logprobs = [0.0, -1e-8, -6e-8, -1e-7, -1e-6, -1e-4, -1e-2, -3.0, -60.0]
    mu, pi = (t.flatten() for t in torch.meshgrid(*[torch.tensor(logprobs)] * 2, indexing="ij"))
    fp32, fp64 = binary_kl(mu, pi), binary_kl(mu.double(), pi.double())
    assert fp32.isfinite().all()
    assert (fp32 >= 0).all()
    certain = pi.exp() > 1 - 1e-6  # 1 - pi below the rounding of fp32: bounded by what one step is worth
    torch.testing.assert_close(fp32[~certain].double(), fp64[~certain], rtol=1e-4, atol=2e-6)
    both = certain & (mu.exp() > 1 - 1e-6)
    assert (fp32[both] < 2e-5).all()
    assert (fp32[mu == pi] == 0).all()


@pytest.mark.parametrize("kind", ["topk_tv", "topk_kl"])
def test_unlisted_mass_below_rounding_is_dropped(kind):
    """fp32 probabilities of a whole vocabulary sum to 1 only within rounding; the rest is not mass."""
    for seed in range(20):
        case = random_case(seed, tokens=16, vocab=12, k=12, on_policy=True, dtype=torch.float32)
        topk = dataclasses.replace(case.topk, other_logprob=torch.full((16,), -30.0))
        out = build_objective(f"dppo_{kind}")(**{**case.call, "topk": topk})
        assert out.divergence.max() < 1e-5
        assert reduce_metrics(out.metrics)["topk/tail_mass_rollout"] == 0


def test_a_running_sum_that_is_not_finite_does_not_change_other_sequences():
    """Running sums are integers over the whole pack: 0, 0.5 | 0, nan, inf | 0, 2 | ..."""
    case = random_case(0, tokens=7)
    tokens = check_and_clean(
        build_objective("cppo"),
        logprob=case.call["logprob"][:7], mask=torch.ones(7, dtype=torch.bool),
        rollout_logprob=case.call["rollout_logprob"][:7], advantage=torch.ones(7),
        sequence_ids=torch.tensor([0, 0, 1, 1, 1, 2, 2]),
    )  # fmt: skip
    value = torch.tensor([0.5, 1.0, torch.nan, torch.inf, 1.0, 2.0, 3.0], dtype=torch.float64)
    assert sum_before(value, tokens).tolist() == [0.0, 0.5, 0.0, 0.0, 1000.0, 0.0, 2.0]
