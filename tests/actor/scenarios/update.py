"""Updates and log-probs. Every function runs on all ranks and returns plain values from rank 0."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from dppo_megatron.objectives import build_objective
from tests.actor.scenarios.parts import fingerprint, of_each_sequence, same, topk, train
from tests.support.actor_cases import VOCAB, K, micro_batches, pack, sequences, with_sampling_masks
from tests.support.actor_ranks import Rank
from tests.support.host_reads import no_host_reads

TEACHER_K = 30  # of 37 tokens: more than a shard of two has


def scores(rank: Rank) -> Any:
    """Top-K log-probs of the weights and, after they moved, of a reference, in every layout of this world."""
    from dppo_megatron.actor import Reference

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
    from dppo_megatron.actor import TrainerTeacher

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


def host_reads(rank: Rank) -> Any:
    """Run LossStep and LogprobStep in several layouts; a read of the host raises."""
    from dppo_megatron.actor import forward

    def unread(step):
        def checked(*args, **kwargs):
            with no_host_reads():
                return step(*args, **kwargs)

        return checked

    layouts = {"alone": {}}
    if rank.world_size == 2:
        layouts = {"tensor": {"tensor": 2}, "context": {"context": 2}}
    objectives = [topk(), build_objective("gspo", entropy_coefficient=0.1), build_objective("drpo")]
    patches = [(forward.LossStep, "loss"), (forward.LogprobStep, "collect")]
    found = []
    with contextlib.ExitStack() as stack:
        for owner, name in patches:
            stack.enter_context(mock.patch.object(owner, name, unread(getattr(owner, name))))
        for layout in layouts.values():
            for settings in ({}, {"logits": "fused"}):
                with rank.actor(settings=settings, **layout) as actor:
                    batches = micro_batches(sequences(), 2)
                    found += [actor.train_update(batches, objective).loss for objective in objectives]
                    actor.scores(batches, topk=True)
                    found.append(actor.train_update([*map(with_sampling_masks, batches)], objectives[0]).loss)
    return found


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


def wrong_ids(rank: Rank) -> Any:
    """The error for each field that names a token outside the vocabulary."""
    messages = {}
    with rank.actor() as actor:
        for name in ("token_ids", "target_ids", "topk_ids"):
            right, wrong = micro_batches(sequences(), 2)
            ids = getattr(wrong, name).clone()
            ids[3] = VOCAB
            try:
                actor.train_update([right, replace(wrong, **{name: ids})], topk())
            except ValueError as error:
                messages[name] = str(error)
    return messages


# ---- one rank


def alone(rank: Rank) -> Any:
    """The reference of every layout, and the checkpoint that other layouts load."""
    with rank.actor() as actor:
        result = train(actor, sequences())
        actor.save_checkpoint(rank.models.parent / "from_one_rank", 3, {"step": 3}, keep=1)
        result["continued"] = train(actor, sequences(seed=1), updates=2)
    return result


def packing(rank: Rank) -> Any:
    """The first update of the same sequences, packed in several ways."""
    results = {}
    for split in (1, 3, 12):
        with rank.actor() as actor:
            results[split] = train(actor, sequences(), updates=1, split=split)
    # Ratios of whole responses, an entropy term with a gradient, and sequences none of whose tokens carries loss.
    objective = build_objective("gspo", entropy_coefficient=0.1)
    parts = sequences()
    parts[3]["mask"][:] = False
    parts[3]["loss_weight"] = parts[3]["loss_weight"] * 0
    for split in (1, 3, 12):
        with rank.actor() as actor:
            stats = actor.train_update(micro_batches(parts, split), objective)
            results["gspo", split] = (stats.loss, stats.grad_norm)
    return results


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


SP, SINKS = {"tensor": 2, "sequence": True}, {"tensor": 2, "sequence": True, "expert_tensor": 1}
AGAINST_TRANSFORMERS: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {  # ranks -> name -> family, layout
    1: {
        **{family: (family, {}) for family in ("qwen3", "llama", "qwen3_5", "qwen3_5_moe", "gpt_oss")},
        "sinks_recompute": ("gpt_oss", {"settings": {"recompute": "full"}}),
        "sinks_bf16": ("gpt_oss", {"settings": {"dtype": "bf16"}}),
    },
    2: {
        "delta_net_tensor": ("qwen3_5", {"tensor": 2}),
        "delta_net_sequence": ("qwen3_5", SP),
        "delta_net_recompute": ("qwen3_5", {**SP, "settings": {"recompute": "full"}}),
        "delta_net_experts": ("qwen3_5_moe", {**SP, "expert": 2, "expert_tensor": 1}),
        "sinks_tensor": ("gpt_oss", SINKS),
        "sinks_experts": ("gpt_oss", {**SINKS, "expert": 2}),
        "sinks_context": ("gpt_oss", {"context": 2}),
        "sinks_stages": ("gpt_oss", {"pipeline": 2}),
    },
}
WITH_BIAS = ("deepseek", "moonlight", "kimi_k2", "glm4_moe")
WITH_EXPERTS = ("qwen3_moe", *WITH_BIAS)
EXPERTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"alone": {}},
    2: {"tensor": SP, "tensor_experts": {**SP, "expert": 2, "expert_tensor": 1}},
}


def against_transformers(rank: Rank) -> Any:
    cases = AGAINST_TRANSFORMERS[rank.world_size].items()
    return {name: _against_transformers(rank, family, **layout) for name, (family, layout) in cases}


def experts_against_transformers(rank: Rank) -> Any:
    layouts = EXPERTS[rank.world_size].items()
    return {(f, name): _against_transformers(rank, f, **layout) for f in WITH_EXPERTS for name, layout in layouts}


def _against_transformers(rank: Rank, family: str, **layout: Any) -> dict[str, Any]:
    """Return log-probs and the nll gradient norm as pairs: the actor's, and those of transformers."""
    from transformers import AutoModelForCausalLM

    parts = sequences()
    batch = replace(pack(parts), temperature=None)
    model = AutoModelForCausalLM.from_pretrained(rank.models / family, dtype=torch.float32)
    expected, loss = of_each_sequence(lambda ids: model(ids).logits[0], parts, tempered=False)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    with rank.actor(family, **layout) as actor:
        logprobs = actor.logprobs([batch])[0]
        score = actor.score(parts[1]["token_ids"].numpy())
        biases = expert_biases(actor)
        stats = actor.train_update([batch], build_objective("nll"))
        frozen = all(map(torch.equal, biases, expert_biases(actor)))
    whole = model(parts[1]["token_ids"][None]).logits[0].log_softmax(-1)[:-1]
    scored = whole.gather(1, parts[1]["token_ids"][1:, None])[:, 0].detach()
    return {
        "logprobs": (logprobs, expected),
        "score": (torch.as_tensor(score), scored),
        "loss": (stats.loss, float(loss)),
        "grad_norm": (stats.grad_norm, float(norm)),
        "frozen_biases": (len(biases) if frozen else None, 3 if family in WITH_BIAS else 0),
    }


def expert_biases(actor) -> list[torch.Tensor]:
    return [b.clone() for c in actor.model_chunks for name, b in c.named_buffers() if name.endswith("expert_bias")]


def non_finite(rank: Rank) -> Any:
    """Train on infinite gradients, then with NaN weights, until training stops."""
    from dppo_megatron.actor import TrainingDiverged

    good = micro_batches(sequences(), 2)
    bad = [good[0], replace(good[1], loss_weight=good[1].loss_weight * float("inf"))]
    with rank.actor(optimizer={"max_skipped_in_a_row": 3}) as actor:
        actor.train_update(good, topk())
        before, lr = fingerprint(actor), actor.lr
        skipped = [actor.train_update(bad, topk()) for _ in range(2)]
        unchanged = same(before, fingerprint(actor)) and actor.lr == lr
        recovered = actor.train_update(good, topk())
        with torch.no_grad():
            actor.model_chunks[0].decoder.final_layernorm.weight[0] = float("nan")
        stats, error = [], None
        try:
            for _ in range(5):
                stats.append(actor.train_update(good, topk()))
        except TrainingDiverged as raised:
            error = str(raised)
    return {
        "skipped": [(s.skipped, s.skipped_in_a_row) for s in skipped],
        "unchanged": unchanged,
        "recovered": (recovered.skipped, recovered.skipped_in_a_row),
        "reported": [(s.skipped, s.nonfinite_tokens, s.loss_tokens) for s in stats],
        "error": error,
    }


def no_loss_rows(rank: Rank) -> Any:
    """Train on a micro-batch without loss rows, with another and by itself."""
    good = pack(sequences())
    empty = replace(good, mask=torch.zeros_like(good.mask), loss_weight=torch.zeros_like(good.loss_weight))
    with rank.actor() as actor:
        alone = actor.train_update([good], topk())
    with rank.actor() as actor:
        both = actor.train_update([good, empty], topk())
        nothing = actor.train_update([empty], topk())
        logprobs = actor.logprobs([empty])[0]
    return {
        "loss": (alone.loss, both.loss),
        "grad_norm": (alone.grad_norm, both.grad_norm),
        "loss_tokens": both.loss_tokens,
        "nothing": (nothing.loss, nothing.grad_norm, nothing.skipped),
        "logprobs": logprobs,
    }


def schedules(rank: Rank) -> Any:
    """The learning rate each of the run's ten updates applies."""
    batch = [pack(sequences(3))]
    results = {}
    for decay, warmup in (("constant", 0), ("constant", 4), ("linear", 4), ("cosine", 0)):
        optimizer = {"lr": 0.1, "min_lr": 0.01, "decay": decay, "warmup_updates": warmup}
        with rank.actor(optimizer=optimizer) as actor:
            results[decay, warmup] = [actor.train_update(batch, topk()).lr for _ in range(10)]
    return results
