"""Engines report the sampling mask of every position, and log-probs that are normalized over it."""

import asyncio
import dataclasses

import numpy as np
import pytest
import torch

from dppo_megatron.data.packing import TokenSequence, pack
from dppo_megatron.types import Prompt, TokenBatch
from tests.rollout.engines.test_contract import some_steps
from tests.support.actor_ranks import Rank, run_scenario
from tests.support.engines import PROMPT, VOCAB, group


def truncated(served) -> dict[str, float]:
    """SGLang takes no min_p with seeds."""
    return {"top_p": 0.9, "top_k": 20, "min_p": 0.05 if served.kind == "vllm" else 0.0, "sampling_mask": True}


def split(rollout) -> list[np.ndarray]:
    return np.split(rollout.sampling_mask_ids, np.cumsum(rollout.sampling_mask_counts)[:-1])


def left(logprobs: np.ndarray, kind: str) -> tuple[set[int], set[int]]:
    """Return the ids of ln p [V] that are certainly in the sampling mask, and those that may be in it.

    vLLM applies min-p, top-k and top-p one after the other, SGLang top-p to the share of the whole vocabulary.
    """
    out = []
    for slack in (-1e-4, 1e-4):
        p = np.exp(logprobs)
        if kind == "vllm":
            p = np.where(p >= (0.05 - slack / 10) * p.max(), p, 0)
        order = np.argsort(-p)[:20]
        p = p[order] / (p[order].sum() if kind == "vllm" else 1.0)
        before = np.cumsum(p) - p
        out.append(set(order[(before < 0.9 + slack) & (p > 0)].tolist()))
    return out[0], out[1]


def test_log_probs_are_over_the_reported_sets(served):
    """Log-probs are the reference's, normalized over the reported mask, to 2e-5 in fp32."""
    request = group("kept", n=8, max_tokens=40, temperature=0.8, topk=5, **truncated(served))
    rollouts = served.use(lambda engine: engine.generate(request))
    plain = served.use(lambda engine: engine.generate(group("plain", n=1, topk=5)))
    assert plain[0].sampling_mask_ids is None
    assert plain[0].sampling_mask_counts is None
    sizes = np.concatenate([r.sampling_mask_counts for r in rollouts])
    assert sizes.min() < 5 < sizes.max() <= 20
    for rollout in rollouts:
        full = served.reference("a").logprobs(PROMPT, rollout.token_ids, 0.8)
        for token, ids, row, logprob, topk, topk_logprob in zip(
            rollout.token_ids, split(rollout), full, rollout.rollout_logprob, rollout.topk_ids,
            rollout.rollout_topk_logprob, strict=True,
        ):  # fmt: skip
            surely, maybe = left(row, served.kind)
            assert surely <= set(ids.tolist()) <= maybe
            over = torch.full((VOCAB,), -torch.inf, dtype=torch.float64)
            over[ids] = torch.from_numpy(row[ids]).double()
            over = over.log_softmax(0).numpy()
            assert abs(over[token] - logprob) < 2e-5
            listed = topk[topk >= 0]
            assert len(listed) == min(5, len(ids))
            assert set(listed.tolist()) <= set(ids.tolist())
            assert np.abs(over[listed] - topk_logprob[: len(listed)]).max() < 2e-5


@pytest.mark.slow
def test_sets_of_interrupted_and_crowded_samples_are_their_own(served):
    """Preempted, aborted and mixed with requests of other settings: each position still has the set it drew from."""
    request = group("alone", n=3, max_tokens=100, **truncated(served))

    async def crowd(engine):
        running = asyncio.gather(
            engine.generate(request),
            engine.generate(group("greedy", n=2, temperature=0.0, max_tokens=60)),
            engine.generate(group("full", n=2, max_tokens=60, topk=3)),
            engine.generate(group("cut", n=4, max_tokens=200, first_seed=50, **truncated(served))),
        )
        await some_steps(engine, running)
        await engine.abort("cut")
        await engine.load_weights(served.models["a"], 1, "keep")
        return await running

    for _ in range(5):  # on a busy machine the samples to be cut may have ended before the call to abort them
        together, _, _, cut = served.use(crowd)
        if any(rollout.finish_reason == "abort" for rollout in cut):
            break
    alone = served.use(lambda engine: engine.generate(request))
    for one, other in zip(together, alone, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.sampling_mask_counts.tolist() == other.sampling_mask_counts.tolist()
        assert one.sampling_mask_ids.tolist() == other.sampling_mask_ids.tolist()
    assert any(rollout.finish_reason == "abort" for rollout in cut)
    for rollout in cut:
        assert len(rollout.sampling_mask_counts) == len(rollout.token_ids)
        assert all(token in ids for token, ids in zip(rollout.token_ids, split(rollout), strict=False))


def megatron_logprobs(rank: Rank, batch: TokenBatch, *heads: str) -> dict[tuple[int, str], torch.Tensor]:
    """Return ln pi of the targets, by tensor-parallel size and kind of head."""
    found = {}
    for logits in heads:
        layout = {"tensor": rank.world_size, "sequence": rank.world_size > 1}  # experts need sequence parallelism
        with rank.actor("a", settings={"logits": logits}, **layout) as actor:
            found[rank.world_size, logits] = actor.logprobs([batch])[0]
    return found


@pytest.mark.slow
@pytest.mark.engines
def test_the_trainer_has_the_engines_log_probs(served, ranks, tmp_path):
    """Equal weights, fp32: 1e-5 over the sampled tokens, tensor-parallel or not; unreplayed they would be far off."""
    request = group("trained", n=8, max_tokens=60, topk=5, **truncated(served))
    rollouts = served.use(lambda engine: engine.generate(request))
    prompt = Prompt(0, 0, PROMPT, "", "")
    batch = pack([TokenSequence.from_rollout(prompt, r, advantage=1.0, loss_weight=0.1) for r in rollouts])
    models = served.models["a"].parent
    full = dataclasses.replace(batch, sampling_mask_ids=None, sampling_mask_counts=None)
    for size in (1, 2):
        found = run_scenario(ranks(size), megatron_logprobs, models, tmp_path / str(size), batch, "stored", "fused")
        for logprob in found.values():
            assert (logprob - batch.rollout_logprob)[batch.mask].abs().max() < 1e-5
    without = run_scenario(ranks(1), megatron_logprobs, models, tmp_path / "full", full, "stored")[1, "stored"]
    assert (without - batch.rollout_logprob)[batch.mask].abs().max() > 0.05
