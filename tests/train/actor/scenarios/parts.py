"""Updates on a rank's share of some sequences, an actor's state to compare, and checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dppo_megatron.objectives import build_objective
from tests.support.actor_cases import micro_batches, pack, sequences
from tests.support.actor_ranks import Rank


def topk():
    return build_objective("dppo_topk_tv", delta=0.2)


def train(actor, parts, *, updates: int = 3, split: int = 2) -> dict[str, list[float]]:
    """Train on this rank's share of `parts`; return the values that all ranks must agree on."""
    rank, size = actor.layout.data_parallel_rank, actor.layout.data_parallel_size
    batches = micro_batches(parts[rank::size], split)
    stats = [actor.train_update(batches, topk()) for _ in range(updates)]
    return {
        "loss": [s.loss for s in stats],
        "loss_scale": [s.loss_scale or 1.0 for s in stats],
        "grad_norm": [s.grad_norm for s in stats],
        "masked": [s.metrics["policy/masked_share"] for s in stats],
        "masked_tokens": [s.masked for s in stats],
        "entropy": [s.metrics["train/entropy"] for s in stats],
        "tokens": [s.tokens for s in stats],
        "loss_tokens": [s.loss_tokens for s in stats],
        "logprobs": torch.cat(actor.logprobs([pack(parts)])),
    }


def of_each_sequence(
    logits_of: Callable[[torch.Tensor], torch.Tensor], parts, *, tempered: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return packed log-probs [T] and the nll of `parts`, each computed by itself from logits_of([1, T]) -> [T, V]."""
    logprobs, loss = [], torch.zeros(())
    for part in parts:
        logits = logits_of(part["token_ids"][None])
        logits = logits / part["temperature"][:, None] if tempered else logits
        logprob = logits.log_softmax(-1).gather(1, part["token_ids"].roll(-1)[:, None])[:, 0]
        logprobs.append(torch.where(part["mask"], logprob, 0.0).detach())
        loss = loss - (part["loss_weight"] * logprob).sum()
    return torch.cat(logprobs), loss


def weights(actor) -> dict[str, torch.Tensor]:
    """Copies of the parameters of this rank."""
    chunks = enumerate(actor.model_chunks)
    return {f"{n}.{name}": p.detach().clone() for n, chunk in chunks for name, p in chunk.named_parameters()}


def fingerprint(actor) -> dict[str, torch.Tensor]:
    """Every weight and every optimizer tensor of this rank, bit for bit."""
    out = weights(actor)
    for index, part in enumerate(actor.optimizer.chained_optimizers):
        for g, group in enumerate(part.optimizer.param_groups):
            for p, parameter in enumerate(group["params"]):
                out[f"optimizer.{index}.{g}.{p}.main"] = parameter.detach().clone()
                for key, value in part.optimizer.state[parameter].items():
                    out[f"optimizer.{index}.{g}.{p}.{key}"] = torch.as_tensor(value).detach().clone()
    return out


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def everywhere(fact: bool) -> bool:
    """True where it is true on every rank."""
    value = torch.tensor(fact)
    torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MIN)
    return bool(value)


def refused(rank: Rank, directory: Path, model: str = "qwen3", changes: dict[str, Any] | None = None) -> str:
    """Return why a run of these settings does not load the checkpoint."""
    from dppo_megatron.train.actor import CheckpointError

    with pytest.raises(CheckpointError) as raised, rank.actor(model, **(changes or {})) as actor:
        actor.load_checkpoint(directory)
    return str(raised.value)


def assert_resumed(
    rank: Rank,
    name: str,
    given: dict[str, Any],
    start: Callable[[Any], object] = lambda actor: None,
    lose: Callable[[Any], object] = lambda actor: None,
    updates: int = 1,
) -> None:
    """Save and continue; load and continue: state, bits (with random numbers) and losses must agree."""
    with rank.actor(**given) as actor:
        start(actor)
        train(actor, sequences(), updates=2)
        actor.save_checkpoint(rank.directory / name, 2, {"step": 2}, keep=1)
        expected = train(actor, sequences(seed=1), updates=updates)
        bits, draws = fingerprint(actor), torch.rand(3)
    with rank.actor(**given) as actor:
        lose(actor)
        assert actor.load_checkpoint(rank.directory / name) == {"step": 2}, name
        got = train(actor, sequences(seed=1), updates=updates)
        for value in ("loss", "loss_scale"):
            assert got[value] == expected[value], name
        assert everywhere(same(bits, fingerprint(actor))), name
        assert torch.equal(draws, torch.rand(3)), name
