"""Samples of several turns and branches train as a dense computation in float64 does, in every layout."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dppo_megatron.bank import BankReader, BankWriter
from dppo_megatron.objectives import TopKLogprobs, build_objective, group_advantages
from dppo_megatron.types import POLICY, Rollout, RolloutGroup
from tests.parallel.cases import PROMPTS, SAMPLES, TEMPERATURE, sample_groups, sections
from tests.support.actor_cases import make_models
from tests.support.actor_ranks import Rank, run_scenario
from tests.support.turns import with_turns

pytestmark = pytest.mark.slow

METHODS = {
    "dppo": {"name": "dppo_topk_tv", "aggregation": "token_mean", "settings": {"delta": 0.1}},
    "gspo": {"name": "gspo", "aggregation": "seq_mean_token_mean"},
    "centred": {
        "name": "dppo_binary_tv",
        "aggregation": "seq_mean_token_sum_norm",
        "settings": {"delta": 0.1, "centering": "policy", "response_region": "mean", "response_delta": 2.0},
    },
    "cppo": {"name": "cppo", "settings": {"delta": 0.05, "position_weight": 0.3}},
    "by_turn": {"name": "dppo_binary_tv", "credit": "turn", "discount": 0.5, "settings": {"delta": 0.1}},
    "gspo_by_turn": {"name": "gspo", "credit": "turn", "discount": 0.5},
}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {}},
    2: {"tp2": {"tensor": 2, "sequence": True}, "cp2": {"context": 2}, "pp2": {"pipeline": 2}, "dp2": {}},
    4: {"tp2_cp2": {"tensor": 2, "sequence": True, "context": 2}},
}


def method_sections(bank: Path, method: str, **rollout: Any) -> dict[str, dict]:
    found = sections(bank, "") | {"objective": METHODS[method]}
    found["rollout"] |= rollout
    return found


def turns_update(rank: Rank, methods: tuple[str, ...], replay: bool, layouts: dict[str, dict]) -> dict:
    """(layout, method) -> loss, gradient norm before clipping, and counts of one step on the bank of turns."""
    from tests.parallel.scenarios import batches_of

    model = "qwen3_moe" if replay else "qwen3"
    bank = rank.models.parent / "turns" / model
    found = {}
    for name, layout in layouts.items():
        for method in methods:
            settings = method_sections(bank, method, routing_replay=replay)
            with rank.actor(model, sections=settings, **layout) as actor:
                objective = build_objective(actor.config.objective.name, **actor.config.objective.settings)
                (update,) = batches_of(actor, objective).read(0).updates
                stats = actor.train_update(update.micro_batches, objective)
            found[name, method] = {
                "loss": stats.loss,
                "grad_norm": stats.grad_norm,
                "disagreement": stats.metrics.get("moe/routing_replay_disagreement", 0.0),
                "tokens": stats.tokens,
                "loss_tokens": stats.loss_tokens,
                "masked": sum(stats.masked.values()),
            }
    return found


@pytest.fixture(scope="module")
def turn_models(tmp_path_factory) -> Path:
    from transformers import AutoModelForCausalLM

    root = make_models(tmp_path_factory.mktemp("turns") / "models", "qwen3", "qwen3_moe")
    for name in ("qwen3", "qwen3_moe"):
        policy = AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.float32).eval()
        with BankWriter(root.parent / "turns" / name, PROMPTS, fsync=False) as bank:
            for group in sample_groups(policy, PROMPTS, torch.Generator().manual_seed(5)):
                bank.append(_rewarded(with_turns(group)))
    return root


def _rewarded(group: RolloutGroup) -> RolloutGroup:
    """With a reward of every turn, which the trajectory's does not add up to."""
    turns = {r.trajectory: max(_turns(r)) + 1 for r in group.rollouts}
    rng = np.random.default_rng(group.prompt.position)
    rewards = (rng.standard_normal(count, np.float32) for count in turns.values())
    return replace(group, turn_rewards=tuple(rewards))


def _turns(rollout: Rollout) -> list[int]:
    """Return the turn of each token after the prompt."""
    if rollout.spans is None:
        return [0] * len(rollout.token_ids)
    return [turn for _, tokens, turn in rollout.spans.tolist() for _ in range(tokens)]


def _by_turn(rewards: list[float], turn_rewards: list[list[float]], discount: float) -> list[list[float]]:
    """The advantage of each turn of each trajectory, from the formula."""
    earned = [[*of[:-1], of[-1] + reward - sum(of)] for reward, of in zip(rewards, turn_rewards, strict=True)]
    returns = [[sum(discount ** (m - k) * of[m] for m in range(k, len(of))) for k in range(len(of))] for of in earned]
    out: list[list[float]] = [[] for _ in rewards]
    for k in range(max(map(len, returns))):
        there = [i for i, of in enumerate(returns) if k < len(of)]
        mean = sum(returns[i][k] for i in there) / len(there)
        for i in there:
            out[i].append(returns[i][k] - mean if len(there) > 1 else out[i][0])
    return out


@pytest.fixture(scope="module")
def trained(ranks, turn_models, tmp_path_factory):
    root = tmp_path_factory.mktemp("trained")

    @functools.cache
    def result(world: int, replay: bool) -> dict:
        methods = ("dppo",) if replay else tuple(METHODS)
        where = root / f"{world}-{replay}"
        return run_scenario(ranks(world), turns_update, turn_models, where, methods, replay, LAYOUTS[world])

    return result


@pytest.fixture(scope="module")
def dense(turn_models):
    """f(method) -> (loss, gradient norm) by transformers in float64, branch after branch, from the bank's groups."""
    return functools.cache(functools.partial(_dense, turn_models))


def _dense(models: Path, method: str) -> tuple[float, float]:
    from transformers import AutoModelForCausalLM

    reader = BankReader(models.parent / "turns" / "qwen3")
    groups = [reader.read(entry) for entry in reader.entries(0, reader.refresh())]
    model = AutoModelForCausalLM.from_pretrained(models / "qwen3", dtype=torch.float32).double()
    config = METHODS[method]
    objective = build_objective(config["name"], **config.get("settings", {}))
    horizon = sections(models, "")["rollout"]["max_response_tokens"]
    rows: list[dict[str, torch.Tensor]] = []
    owners = []  # (group, trajectory) of each row
    for g, group in enumerate(groups):
        rewards = {r.trajectory: float(v) for r, v in zip(group.rollouts, group.rewards, strict=True)}
        advantages = group_advantages(torch.tensor([[rewards[t] for t in range(SAMPLES)]], dtype=torch.float64))[0]
        of_turns = _by_turn([rewards[t] for t in range(SAMPLES)], [w.tolist() for w in group.turn_rewards], 0.5)
        for r in group.rollouts:
            size, prompt = len(r.token_ids), len(group.prompt.token_ids)
            spans = [[POLICY, size, 0]] if r.spans is None else r.spans.tolist()
            mask = torch.tensor([origin == POLICY for origin, n, _ in spans for _ in range(n)])
            tokens = torch.tensor([*group.prompt.token_ids, *r.token_ids]).long()
            logprobs = (model(tokens[None]).logits[0, prompt - 1 : -1] / TEMPERATURE).log_softmax(-1)
            fields = {"logprob": logprobs.gather(1, tokens[prompt:, None])[:, 0], "mask": mask, "all": logprobs}
            fields["target_ids"] = tokens[prompt:]
            for name, of in (("rollout", r.rollout_logprob), ("lists", r.rollout_topk_logprob), ("ids", r.topk_ids)):
                whole = torch.zeros(size, *of.shape[1:], dtype=torch.float64 if name != "ids" else torch.long)
                whole[mask] = torch.from_numpy(of).to(whole.dtype)
                fields[name] = whole
            fields["advantage"] = advantages[r.trajectory].expand(size)
            if "credit" in config:
                fields["advantage"] = torch.tensor([of_turns[r.trajectory][turn] for turn in _turns(r)]).double()
            fields["sequence_ids"] = torch.full((size,), len(rows))
            fields["positions"] = torch.arange(prompt - 1, prompt + size - 1)
            rows.append(fields)
            owners.append((g, r.trajectory))
    tokens_of = {o: sum(int(x["mask"].sum()) for x, p in zip(rows, owners, strict=True) if p == o) for o in owners}
    count = len(tokens_of)
    weight = {
        "token_mean": lambda o: 1 / sum(tokens_of.values()),
        "seq_mean_token_mean": lambda o: 1 / (count * tokens_of[o]),
        "seq_mean_token_sum_norm": lambda o: 1 / (count * horizon),
    }[config.get("aggregation", "seq_mean_token_sum_norm")]
    weights = torch.cat([x["mask"] * weight(o) for x, o in zip(rows, owners, strict=True)])
    x = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    ids = x["ids"]
    listed = x["all"].gather(1, ids)
    own = (ids == x["target_ids"][:, None]).any(1)
    others = torch.ones_like(x["all"], dtype=torch.bool).scatter(
        1, torch.cat([ids, x["target_ids"][:, None]], 1), False
    )
    topk = TopKLogprobs(
        ids=ids,
        rollout_logprob=x["lists"],
        logprob=listed,
        other_logprob=x["all"].masked_fill(~others, -torch.inf).logsumexp(1),
        target_ids=x["target_ids"],
        vocab_size=model.config.vocab_size,
    )
    assert own.any()
    out = objective(
        logprob=x["logprob"],
        mask=x["mask"],
        rollout_logprob=x["rollout"],
        old_logprob=x["logprob"].detach(),
        advantage=x["advantage"],
        topk=topk,
        sequence_ids=x["sequence_ids"],
        **({"positions": x["positions"]} if objective.needs_positions else {}),
    )
    loss = (weights * out.loss).sum()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    return float(loss), float(norm)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("world", "layout"), [(w, name) for w, layouts in LAYOUTS.items() for name in layouts])
def test_loss_and_gradient_are_the_dense_ones(trained, dense, world, layout, method):
    loss, norm = dense(method)
    found = trained(world, False)[layout, method]
    assert found["loss"] == pytest.approx(loss, rel=1e-5, abs=1e-7)
    assert found["grad_norm"] == pytest.approx(norm, rel=2e-5)


def test_only_sampled_tokens_count(trained, turn_models):
    reader = BankReader(turn_models.parent / "turns" / "qwen3")
    groups = [reader.read(entry) for entry in reader.entries(0, reader.refresh())]
    sampled = sum(len(r.versions) for g in groups for r in g.rollouts)
    every = sum(len(r.token_ids) for g in groups for r in g.rollouts)
    assert sampled < every
    for layout in LAYOUTS[2]:
        assert trained(2, False)[layout, "dppo"]["loss_tokens"] == sampled


def test_routing_of_all_turns_is_replayed_alike_in_every_layout(trained):
    expected = trained(1, True)["one", "dppo"]
    assert 0.01 < expected["disagreement"] < 0.5
    for world in (2, 4):
        for layout in LAYOUTS[world]:
            found = trained(world, True)[layout, "dppo"]
            assert {n: found[n] for n in ("tokens", "loss_tokens", "masked")} == {
                n: expected[n] for n in ("tokens", "loss_tokens", "masked")
            }
            for name in ("loss", "grad_norm", "disagreement"):
                assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), (layout, name)
