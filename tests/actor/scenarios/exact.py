"""Compute packed and single sequences with `engine.exact`, and updates with and without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dppo_megatron.actor.local.exact import ExactAttention
from dppo_megatron.engines.exact import Exact, Operators
from dppo_megatron.vocab_parallel import compiled
from tests.actor.scenarios.parts import train
from tests.support.actor_cases import VOCAB, K, pack, sequences
from tests.support.actor_ranks import Rank

EXACT = {"engine": {"exact": True, "dtype": "fp32"}}
LAYOUTS = {1: {"alone": {}}, 2: {"tensor": {"tensor": 2}, "sequence": {"tensor": 2, "sequence": True}}}


def exact(rank: Rank) -> Any:
    """By layout: log-probs of all sequences in one micro-batch and each by itself; updates with it and without."""
    parts, results = sequences(), {}
    for name, layout in LAYOUTS[rank.world_size].items():
        with rank.actor(sections=EXACT, **layout) as actor:
            packed = torch.cat([s.logprob for s in actor.scores([pack(parts)])])
            alone = torch.cat([s.logprob for s in actor.scores([pack([part]) for part in parts])])
            trained = train(actor, parts)
        with rank.actor(**layout) as actor:
            results[name] = packed, alone, trained, train(actor, parts)
    return results


def changed_layers(rank: Rank) -> tuple[set[str], set[str]]:
    """Names of the layers that compute otherwise than Megatron's and ours do in every run, without it and with it."""
    found = []
    for sections in ({}, EXACT):
        with rank.actor(sections=sections) as actor:
            layers = actor.model_chunks[0].named_modules()
            changed = (
                name for name, layer in layers if type(layer) is ExactAttention or "_forward_impl" in vars(layer)
            )
            found.append({name.rpartition(".")[2] for name in changed})
    return found[0], found[1]


def compiles(rank: Rank) -> tuple[bool, bool]:
    """Whether statistics of columns that are worth it would run compiled code, without it and with it."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        calls = []
        patch.setattr(compiled, "_WORTHWHILE", 0)
        patch.setattr(compiled.CompiledOrEager, "__call__", lambda *_, **__: calls.append(1))
        for sections in ({}, EXACT):
            calls.clear()
            with rank.actor(sections=sections) as actor:
                list(actor.scores([pack(sequences())]))
            found.append(bool(calls))
    return found[0], found[1]


def merged(rank: Rank) -> Any:
    """Return log-probs merged from the ranks' shards of logits, and an engine's of the whole logits."""
    from dppo_megatron.vocab_parallel import token_statistics

    columns = -(-VOCAB // rank.world_size)
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(50, columns * rank.world_size, generator=generator)
    ids = torch.stack([torch.randperm(VOCAB, generator=generator)[: 1 + K] for _ in range(50)])
    temperature = torch.linspace(0.5, 1.5, 50)
    operators = Operators(Exact(rank.world_size, (), VOCAB, columns, fp32_head=False))
    results = []
    with rank.actor(tensor=rank.world_size) as actor:
        own = logits[:, rank.rank * columns : (rank.rank + 1) * columns].contiguous()
        group = actor.layout.tensor_group if rank.world_size > 1 else None
        for k in (0, K):
            topk = ids[:, 1:] if k else None
            options = {"vocab_size": VOCAB, "temperature": temperature, "group": group}
            found = token_statistics(own.clone(), ids[:, 0], topk, **options)
            own_ids = [found.logprob[:, None], *([] if topk is None else [found.topk_logprob])]
            results.append(
                (torch.cat(own_ids, dim=1), operators.logprobs(logits[:, :VOCAB], ids[:, : 1 + k], temperature))
            )
    return results
