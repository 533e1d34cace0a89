"""Divergences from a teacher against plain formulas over the whole vocabulary in float64."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import one_hot

from dppo_megatron.objectives import ObjectiveError, ObjectiveSettings, TopKLogprobs, build_objective, reduce_metrics
from dppo_megatron.train.actor import apply_objective, forward
from dppo_megatron.types import TokenBatch
from dppo_megatron.vocab_parallel import linear_token_statistics, token_statistics
from tests.support.divergences import dense_loss
from tests.support.ranks import TORCH, Ranks

T, V, K, WIDTH = 14, 16, 5, 6
EXACT = 1e-9  # relative; the requirement is 1e-6
METHODS: dict[str, dict[str, Any]] = {
    "forward_kl": {},
    "reverse_kl": {},
    "jensen_shannon": {"jensen_shannon_weight": 0.3},
    "sampled": {},
    "clipped": {"distillation": "reverse_kl", "distillation_clip": 0.4},
    "sampled_clipped": {"distillation": "sampled", "distillation_clip": 0.4},
}


def settings(label: str, **more: Any) -> dict[str, Any]:
    plain = {"control": "none", "importance": "none", "advantage_weight": 0.0, "distillation": label}
    return {"distillation_coefficient": 0.7, **plain, **METHODS[label], **more}


def given(k: int = K, seed: int = 0, *, kept: bool = False) -> dict[str, Any]:
    """Draw a head, hidden states, samples, an engine's list and a teacher; with `kept` also sampling masks."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    hidden, weight = normal(T, WIDTH), normal(V, WIDTH)
    mu, teacher = (1.5 * normal(T, V)).log_softmax(1), (2 * normal(T, V)).log_softmax(1)
    inside = torch.ones(T, V, dtype=torch.bool)
    if kept:
        inside = normal(T, V) > 0.3
        inside[::4] = True
        inside |= one_hot(mu.argmax(1), V).bool()
        mu = mu.masked_fill(~inside, -torch.inf).log_softmax(1)
    target = torch.multinomial(mu.exp(), 1, generator=g)[:, 0]
    ids = teacher.topk(k).indices
    ids = torch.where(inside.gather(1, ids), ids, -1)
    if k < V:
        ids[1, -1] = -1  # a list may be shorter
    engine = mu.topk(K).indices
    engine = torch.where(inside.gather(1, engine), engine, -1)
    mask = torch.ones(T, dtype=torch.bool)
    mask[3] = False
    return {"hidden": hidden, "weight": weight, "mu": mu, "teacher": teacher, "inside": inside, "target": target,
            "ids": ids, "engine": engine, "mask": mask, "advantage": normal(T), "kept": kept}  # fmt: skip


def written(label: str, g: dict[str, Any], logits: Tensor, **more: Any) -> Tensor:
    """The loss [T], as the documentation defines it, by a softmax over the sampling mask."""
    return dense_loss(ObjectiveSettings(**settings(label, **more)), g, logits)


def rows(g: dict[str, Any], dtype: torch.dtype = torch.float64, *, engine: bool = True) -> TokenBatch:
    """The batch as the trainer packs it, with values that must not matter where the mask is False."""

    def column(values: Tensor) -> Tensor:
        return torch.where(g["mask"].view(-1, *[1] * (values.dim() - 1)), values, math.nan).to(dtype)

    listed = {name: g[name].int() for name in ("ids", "engine")}
    of_list = g["teacher"].gather(1, g["ids"].clamp(min=0)).masked_fill(g["ids"] < 0, math.nan)
    more = {}
    if engine:
        of_engine = g["mu"].gather(1, g["engine"].clamp(min=0)).masked_fill(g["engine"] < 0, math.nan)
        more = {"topk_ids": listed["engine"], "rollout_topk_logprob": column(of_engine)}
    if g["kept"]:
        more["sampling_mask_ids"] = g["inside"].nonzero()[:, 1].int()
        more["sampling_mask_counts"] = g["inside"].sum(1).int()
    taught = {
        "teacher_ids": listed["ids"],
        "teacher_topk_logprob": column(of_list),
        "teacher_logprob": column(g["teacher"].gather(1, g["target"][:, None])[:, 0]),
    }
    return TokenBatch.from_columns(
        {**taught, **more},
        token_ids=g["target"],
        position_ids=torch.arange(T),
        cu_seqlens=torch.tensor([0, T]),
        target_ids=g["target"],
        mask=g["mask"],
        loss_weight=torch.ones(T),
        advantage=g["advantage"].to(dtype),
        rollout_logprob=column(g["mu"].gather(1, g["target"][:, None])[:, 0]),
    )


def taught(objective, batch: TokenBatch, stats) -> Any:
    return apply_objective(
        objective,
        batch,
        logprob=stats.logprob,
        topk_logprob=stats.topk_logprob,
        other_logprob=stats.other_logprob,
        entropy=None,
        sequence_ids=torch.zeros(T, dtype=torch.long),
        vocab_size=V,
    )


def on_shard(rank: int, world: int, fused: bool, cases: list[tuple]) -> list[dict[str, Tensor]]:
    """Loss and gradients of hidden states and this rank's rows of the head for (label, k, kept, engine, dtype)."""
    group, found = dist.group.WORLD if world > 1 else None, []
    width = -(-(V + 2) // world)  # padded as Megatron pads it
    for label, k, kept, engine, dtype in cases:
        g = given(k, kept=kept)
        batch, objective = rows(g, dtype, engine=engine), build_objective("pg_is", **settings(label))
        whole = torch.zeros(width * world, WIDTH, dtype=torch.float64)
        whole[:V] = g["weight"]
        weight = whole[rank * width : (rank + 1) * width].to(dtype).requires_grad_()
        hidden = g["hidden"].to(dtype).requires_grad_()
        call = {
            "target_ids": batch.target_ids,
            "topk_ids": forward._listed_ids(objective, batch),
            "vocab_size": V,
            "group": group,
            "sampling_mask_ids": batch.sampling_mask_ids,
            "sampling_mask_counts": batch.sampling_mask_counts,
        }
        stats = (
            linear_token_statistics(hidden, weight, **call) if fused else token_statistics(hidden @ weight.T, **call)
        )
        out = taught(objective, batch, stats)
        out.loss.sum().backward()
        gradient = hidden.grad.clone()
        if world > 1 and not fused:
            dist.all_reduce(gradient)
        found.append({"loss": out.loss.detach(), "weight": weight.grad, "hidden": gradient})
    return found


CASES = [
    (label, k, kept, engine, dtype)
    for label in METHODS
    for k in (K, V)
    for kept in (False, True)
    for engine, dtype in ((True, torch.float64), (False, torch.float32))
]


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_are_those_of_the_whole_vocabulary(world):
    """K = V is the divergence itself; the ranks have shards of the head, stored or fused logits, one or two lists."""
    results, cases = {}, CASES
    if world == 1:
        results = {fused: [on_shard(0, 1, fused, cases)] for fused in (False, True)}
    else:
        cases = CASES[::2]
        with Ranks(world, "gloo", TORCH) as ranks:
            for fused in (False, True):
                results[fused] = ranks.run(on_shard, world=world, fused=fused, cases=cases)
    for fused, of_ranks in results.items():
        for number, (label, k, kept, _, dtype) in enumerate(cases):
            g = given(k, kept=kept)
            hidden, weight = g["hidden"].requires_grad_(), g["weight"].requires_grad_()
            loss = written(label, g, hidden @ weight.T)
            loss.sum().backward()
            shards = torch.cat([found[number]["weight"] for found in of_ranks])
            name, found = f"{cases[number]} fused {fused}", of_ranks[0][number]
            values = () if "sampled" in label else ((found["loss"], loss.detach()),)
            for ours, exact in ((found["hidden"], hidden.grad), (shards[:V], weight.grad), *values):
                error = (ours.double() - exact).norm() / exact.norm()
                assert error < (EXACT if dtype == torch.float64 else 3e-6), name
            assert not shards[V:].any(), name


def test_a_list_of_everything_gives_the_divergence_itself():
    g = given(V)
    ln_pi = (g["hidden"] @ g["weight"].T).log_softmax(1)
    p, t = ln_pi.exp(), g["teacher"].exp()
    exact = {"forward_kl": (t * (g["teacher"] - ln_pi)).sum(1), "reverse_kl": (p * (ln_pi - g["teacher"])).sum(1)}
    for label, value in exact.items():
        loss = written(label, g, g["hidden"] @ g["weight"].T) / 0.7
        torch.testing.assert_close(loss, torch.where(g["mask"], value, 0.0), rtol=1e-12, atol=0)


def run(g: dict[str, Any], **axes: Any):
    logits = (g["hidden"] @ g["weight"].T).requires_grad_()
    batch, objective = rows(g), build_objective("pg_is", **axes)
    stats = token_statistics(logits, g["target"], forward._listed_ids(objective, batch))
    out = taught(objective, batch, stats)
    return out, torch.autograd.grad(out.loss.sum(), logits)[0]


def test_it_is_added_to_a_method_and_keeps_its_mask():
    """A reward method with a coefficient; no distillation at tokens beyond the region, or dropped by a correction."""
    g = given()
    method = {"control": "mask", "divergence": "topk_tv", "delta": 0.65}
    plain, reward = run(g, **method)
    alone = {**settings("forward_kl"), "distillation_coefficient": 1.0}
    _, distilled = run(g, **alone)
    both, gradient = run(g, **method, distillation="forward_kl", distillation_coefficient=0.5)
    beyond = (both.divergence > 0.65) & g["mask"]
    assert 0 < beyond.sum() < T - 1
    expected = reward + 0.5 * torch.where(beyond[:, None], 0.0, distilled)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)
    assert torch.equal(both.masked_tokens, plain.masked_tokens)
    metrics = reduce_metrics(both.metrics)
    assert metrics["distillation/dropped_share"] == pytest.approx(float(beyond.sum()) / (T - 1))

    ratio = (torch.log_softmax(g["hidden"] @ g["weight"].T, 1) - g["mu"]).gather(1, g["target"][:, None])[:, 0].exp()
    dropped = (ratio > 1.5) & g["mask"]
    assert 0 < dropped.sum() < T - 1
    corrected = {"control": "none", "mismatch": "mask", "mismatch_high": 1.5}
    _, reward = run(g, **corrected)
    _, gradient = run(g, **corrected, distillation="forward_kl", distillation_coefficient=0.5)
    expected = reward + 0.5 * torch.where(dropped[:, None], 0.0, distilled)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)


def test_the_sampled_kl_is_an_advantage_with_ratio_and_mask():
    g = given()
    gap = (g["teacher"] - torch.log_softmax(g["hidden"] @ g["weight"].T, 1)).gather(1, g["target"][:, None])[:, 0]
    method = {"control": "mask", "divergence": "binary_tv", "delta": 0.02}
    both, gradient = run(g, **method, distillation="sampled", distillation_coefficient=0.5, advantage_weight=2.0)
    changed = {**g, "advantage": 2 * g["advantage"] + 0.5 * gap}
    expected, reference = run(changed, **method)
    torch.testing.assert_close(gradient, reference, rtol=1e-12, atol=1e-14)
    assert torch.equal(both.masked_tokens, expected.masked_tokens)
    assert both.masked_tokens.any()


def test_the_weight_follows_its_schedule():
    g = given()
    stats = token_statistics((g["hidden"] @ g["weight"].T).requires_grad_(), g["target"], g["ids"])
    batch, alone = rows(g, engine=False), settings("reverse_kl")
    plain = build_objective("pg_is", **(alone | {"distillation_coefficient": 2.0}))
    schedule = {"distillation_coefficient": 2.0, "distillation_steps": 10.0, "distillation_end": 0.5}
    objective = build_objective("pg_is", **(alone | schedule))

    def weight(step: int) -> float:
        losses = [taught(each, batch, stats).loss.sum() for each in (objective.at_step(step), plain.at_step(step))]
        return float((losses[0] / losses[1]).detach())

    assert [weight(step) for step in (0, 5, 10, 99)] == pytest.approx([1.0, 0.625, 0.25, 0.25])


@pytest.mark.parametrize("label", ["forward_kl", "reverse_kl", "jensen_shannon"])
def test_it_is_zero_with_zero_gradient_at_the_teacher_in_single_precision(label):
    """Also where the teacher's list holds all but the rounding of its mass."""
    logits = torch.full((2, V), -30.0)
    logits[0, :3] = torch.tensor([2.0, 1.0, 0.0])
    logits[1, 2] = 5.0
    ln_t, target = logits.log_softmax(1), torch.tensor([1, 2])
    ids, sampled = ln_t.topk(4).indices, ln_t.gather(1, target[:, None])[:, 0]
    stats = token_statistics(logits.requires_grad_(), target, ids)
    teacher = TopKLogprobs(ids, ln_t.gather(1, ids), stats.topk_logprob, stats.other_logprob, target)
    out = build_objective("pg_is", **settings(label))(
        logprob=stats.logprob, mask=torch.ones(2), advantage=torch.zeros(2), teacher=teacher, teacher_logprob=sampled
    )
    out.loss.sum().backward()
    assert out.loss.abs().max() < 1e-6
    assert logits.grad.abs().max() < 1e-5


def test_a_rest_without_mass_costs_no_more_than_its_rounding():
    """The teacher is certain, and the policy is elsewhere: about 14 nats in single precision, and not 87."""
    logits, target, ids = torch.zeros(1, V), torch.tensor([2]), torch.tensor([[2]])
    logits[0, 2] = -10.0
    stats = token_statistics(logits, target, ids)
    teacher = TopKLogprobs(ids, torch.zeros(1, 1), stats.topk_logprob, stats.other_logprob, target)
    call = {"mask": torch.ones(1), "advantage": torch.zeros(1), "teacher": teacher, "teacher_logprob": torch.zeros(1)}
    alone = {**settings("reverse_kl"), "distillation_coefficient": 1.0}
    loss = build_objective("pg_is", **alone)(logprob=stats.logprob, **call).loss
    assert 10 < float(loss) < -math.log(torch.finfo(torch.float32).eps)


def test_wrong_combinations_and_inputs_are_named():
    for axes, words in (
        ({"distillation": "forward_kl"}, "distillation_coefficient"),
        ({"distillation_clip": 1.0}, "distillation_clip=1.0 has no effect"),
        (
            {"distillation": "forward_kl", "distillation_coefficient": 1.0, "distillation_end": 1.0},
            "distillation_steps",
        ),
        ({**settings("jensen_shannon"), "jensen_shannon_weight": 1.0}, "must be below 1"),
        ({"advantage_weight": 0.0}, "advantage_weight=0.0 has no effect"),
        (
            {"centering": "policy", "ratio_cap": 2.0, "distillation": "sampled", "distillation_coefficient": 1.0},
            "distillation='sampled' gives only the sampled token",
        ),
    ):
        with pytest.raises(ObjectiveError, match=words):
            build_objective("pg_is", **axes)
    g = given()
    objective, batch = build_objective("pg_is", **settings("reverse_kl")), rows(g)
    call = {"logprob": torch.zeros(T), "mask": batch.mask, "advantage": batch.advantage.float()}
    with pytest.raises(ObjectiveError, match="needs teacher_logprob"):
        objective(**call)
    call |= {"teacher_logprob": batch.extra["teacher_logprob"].float()}
    with pytest.raises(ObjectiveError, match="needs `teacher`, the top-K"):
        objective(**call)
    lists = [batch.extra["teacher_ids"], batch.extra["teacher_topk_logprob"].float()]
    with pytest.raises(ObjectiveError, match=r"topk\.logprob has shape"):
        objective(**call, teacher=TopKLogprobs(*lists, torch.zeros(T, K + 1), torch.zeros(T), batch.target_ids))
    call["logprob"].requires_grad_()
    with pytest.raises(ObjectiveError, match=r"gradient through teacher\.logprob"):
        objective(**call, teacher=TopKLogprobs(*lists, torch.zeros(T, K), torch.zeros(T), batch.target_ids))
