"""Updates and log-probs. Every function runs on all ranks and returns plain values from rank 0."""

from dataclasses import replace
from typing import Any

import torch

from dppo_megatron.objectives import build_objective
from tests.support.actor_cases import VOCAB, K, micro_batches, pack, sequences
from tests.support.actor_ranks import Rank
from tests.train.actor.scenarios.parts import topk, train

TEACHER_K = 30  # of 37 tokens: more than a shard of two has


def scores(rank: Rank) -> Any:
    """Top-K log-probs of the weights and, after they moved, of a reference, in every layout of this world."""
    from dppo_megatron.train.actor import Reference

    layouts = {"alone": {}}
    if rank.world_size == 2:
        layouts = {"tensor": {"tensor": 2}, "pipeline": {"pipeline": 2}, "context": {"context": 2}}
        layouts["pipeline_virtual"] = {"pipeline": 2, "virtual_pipeline": 2}
    results = {}
    for name, layout in layouts.items():
        batches = micro_batches(sequences(), 3)
        with rank.actor(**layout) as actor:
            reference = Reference(actor)
            if not actor.layout.is_last_stage:  # which reads no lists from the bank
                batches = [replace(batch, topk_ids=None, rollout_topk_logprob=None) for batch in batches]
            before = actor.scores(batches, topk=True)
            actor.train_update(batches, topk())
            results[name] = {
                "targets": torch.cat([s.logprob for s in before]),
                "topk": torch.cat([s.topk_logprob for s in before]),
                "other": torch.cat([s.other_logprob for s in before]),
                "moved": torch.cat(actor.logprobs(batches)),
                "reference": torch.cat([s.logprob for s in reference.scores(batches)]),
            }
    return results


def trainer_teacher(rank: Rank) -> Any:
    """Lists of a wider teacher in every layout of this world, with whole and with shared prompts."""
    from dppo_megatron.train.actor import TrainerTeacher

    layouts = {"alone": {}, "alone_fused": {"settings": {"logits": "fused"}}}
    if rank.world_size == 2:
        layouts = {"tensor": {"tensor": 2}, "pipeline": {"pipeline": 2}, "context": {"context": 2}}
        layouts["tensor_sequence"] = {"tensor": 2, "sequence": True, "settings": {"logits": "fused"}}
    results = {}
    teacher = {"path": str(rank.models / "wider"), "in_trainer": True}
    for name, layout in layouts.items():
        sections = {"distillation": {"topk": TEACHER_K, "teachers": {"wider": teacher}}}
        with rank.actor(**layout, sections=sections) as actor:
            batches = [replace(batch, temperature=None) for batch in micro_batches(sequences(), 3)]
            found = [each["extra"] for each in TrainerTeacher(actor).with_lists(batches)]
            assert len(actor.frozen_chunks) == len(actor.model_chunks)
        results[name] = {column: torch.cat([each[column] for each in found]) for column in found[0]}
    return results


def idle_rank(rank: Rank) -> Any:
    """One micro-batch for all: with two ranks, the second of them has only a filler, and half of the experts."""
    from dppo_megatron.data.packing import pack as pack_sequences

    layouts = {"alone": {}}
    if rank.world_size == 2:
        layouts = {name: {"expert": 2, "expert_dispatcher": name} for name in ("alltoall", "allgather")}
        layouts["context"] = {"context": 2}
    results, lists = {}, {"topk_ids": (K,), "rollout_topk_logprob": (K,)}
    for name, layout in layouts.items():
        with rank.actor("qwen3_moe", **layout) as actor:
            batch = pack(sequences()) if actor.layout.data_parallel_rank == 0 else pack_sequences([], like=lists)
            stats = [actor.train_update([batch], topk()) for _ in range(2)]
        results[name] = [(s.loss, s.grad_norm, s.metrics["policy/masked_share"]) for s in stats]
    return results


def shared_prefixes(rank: Rank) -> Any:
    """Return by model an update with whole sequences and one that computes each prompt once."""
    import numpy as np

    from dppo_megatron.data.packing import TokenSequence
    from dppo_megatron.data.packing import pack as pack_sequences

    generator = np.random.default_rng(0)

    def ids(*shape: int) -> np.ndarray:
        return generator.integers(0, VOCAB, shape, dtype=np.int32)

    prompts = [ids(size) for size in (40, 1, 7) for _ in range(4)]
    prompts = [prompts[number // 4 * 4] for number in range(len(prompts))]
    sizes = [9, 9, 3, 1, 30, 2, 2, 2, 40, 33, 35, 1]
    responses = [
        TokenSequence(
            prompt,
            ids(size),
            1 / sum(sizes),
            (-1.0) ** size,
            {"rollout_logprob": generator.normal(-3.5, 0.5, size).astype(np.float32)},
        )
        for prompt, size in zip(prompts, sizes, strict=True)
    ]
    families = {
        "dense": ("qwen3", {}),
        "tied": ("tied", {}),
        "experts": ("qwen3_moe", {}),
        "sinks": ("gpt_oss", {}),
        "lora": ("qwen3", {"lora": {"r": 4}}),
        "recompute": ("qwen3", {"recompute": "full"}),
    }
    results = {}
    for family, (model, settings) in families.items():
        results[family] = []
        for share in (False, True):
            batch = pack_sequences(responses, share_prefixes=share)
            with rank.actor(model, settings=settings) as actor:
                logprobs = actor.logprobs([batch])[0]
                stats = actor.train_update([batch], build_objective("dppo_binary_tv", delta=0.2))
                results[family].append(
                    {
                        "rows": actor.packer(batch).token_ids.shape[1],
                        "tokens": stats.tokens,
                        "loss_tokens": stats.loss_tokens,
                        "logprobs": logprobs,
                        "masked": stats.masked,
                        "loss": torch.tensor(stats.loss),
                        "gradients": {
                            name: parameter.main_grad.clone()
                            for name, parameter in actor.model_chunks[0].named_parameters()
                            if parameter.requires_grad
                        },
                    }
                )
    return results


# ---- one rank


def alone(rank: Rank) -> Any:
    """The reference of every layout, and the checkpoint that other layouts load."""
    with rank.actor() as actor:
        result = train(actor, sequences())
        actor.save_checkpoint(rank.models.parent / "from_one_rank", 3, {"step": 3}, keep=1)
        result["continued"] = train(actor, sequences(seed=1), updates=2)
    return result


def variants(rank: Rank) -> Any:
    """Settings that must not change the numbers."""
    results = {}
    for name, settings in {
        "fused": {"logits": "fused"},
        "selective": {"recompute": "selective"},
        "full": {"recompute": "full"},
        "bf16": {"dtype": "bf16"},
    }.items():
        with rank.actor(settings=settings) as actor:
            results[name] = train(actor, sequences())
    with rank.actor(distributed_optimizer=False) as actor:
        results["plain_optimizer"] = train(actor, sequences())
    return results
