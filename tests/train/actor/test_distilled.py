"""The gradient of every weight by a teacher is that of a float64 reference over the whole vocabulary."""

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dppo_megatron.data.packing import TokenSequence
from dppo_megatron.data.packing import pack as pack_sequences
from dppo_megatron.objectives import ObjectiveSettings, build_objective
from dppo_megatron.types import TokenBatch
from tests.support.actor_cases import VOCAB
from tests.support.actor_ranks import Rank
from tests.support.divergences import dense_loss
from tests.support.in_double import InDouble

TEMPERATURE = 0.9
FUSED = {"settings": {"logits": "fused"}}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"alone": {}, "alone_fused": FUSED},
    2: {
        "tensor": {"tensor": 2},
        "tensor_sequence_fused": {"tensor": 2, "sequence": True, **FUSED},
        "pipeline": {"pipeline": 2},
        "pipeline_fused": {"pipeline": 2, **FUSED},
        "context": {"context": 2},
        "context_fused": {"context": 2, **FUSED},
    },
}
KINDS = ("forward_kl", "reverse_kl", "jensen_shannon", "sampled")
CASES = [(kind, k, masks) for kind in KINDS for k in (6, VOCAB) for masks in (False, True)]


def settings(kind: str) -> dict[str, Any]:
    plain = {"control": "none", "importance": "none", "advantage_weight": 0.0}
    return {**plain, "distillation": kind, "distillation_coefficient": 0.7}


def given(k: int, masks: bool) -> tuple[list[TokenSequence], dict[str, torch.Tensor]]:
    """Four responses to each of three prompts, and what `dense_loss` takes for all of their tokens in one row.

    Every response has an engine's list, the teacher's list and, with `masks`, sampling masks.
    """
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, VOCAB, (size,), generator=generator).int().numpy() for size in (9, 1, 5)]
    sizes = [9, 3, 1, 12, 2, 2, 7, 4, 20, 13, 5, 1]
    count = sum(sizes)
    target = torch.randint(0, VOCAB, (count,), generator=generator)
    teacher = (2 * torch.randn(count, VOCAB, generator=generator)).log_softmax(1)
    engine = torch.randn(count, VOCAB, generator=generator).log_softmax(1).topk(4)
    inside = torch.ones(count, VOCAB, dtype=torch.bool)
    if masks:
        inside = torch.randn(count, VOCAB, generator=generator) > 0.3
        inside |= torch.nn.functional.one_hot(target, VOCAB).bool()
    ids = teacher.topk(k).indices
    columns = {
        "rollout_logprob": torch.full((count,), -3.0),
        "topk_ids": torch.where(inside.gather(1, engine.indices), engine.indices, -1).int(),
        "rollout_topk_logprob": engine.values,
        "teacher_logprob": teacher.gather(1, target[:, None])[:, 0],
        "teacher_ids": torch.where(inside.gather(1, ids), ids, -1).int(),
        "teacher_topk_logprob": teacher.gather(1, ids),
    }
    parts = {name: column.split(sizes) for name, column in columns.items()}
    sequences = []
    for number, (own, allowed) in enumerate(zip(target.int().split(sizes), inside.split(sizes), strict=True)):
        of_own = {name: column[number].numpy() for name, column in parts.items()}
        if masks:
            of_own["sampling_mask_ids"] = allowed.nonzero()[:, 1].int().numpy()
            of_own["sampling_mask_counts"] = allowed.sum(1).int().numpy()
        prompt = prompts[number // 4]
        sequences.append(TokenSequence(prompt, own.numpy(), 1 / count, 0.0, of_own, TEMPERATURE))
    dense = {"inside": inside, "teacher": teacher.double(), "ids": columns["teacher_ids"], "target": target}
    return sequences, {**dense, "mask": torch.ones(count, dtype=torch.bool)}


def gradients(rank: Rank) -> Any:
    """Return the loss and the gradient of every weight, by layout and case; computed in fp64 and summed in fp32.

    A micro-batch has the responses to one prompt, which is computed once where the layout can.
    """
    from dppo_megatron.train.actor import actor as module
    from dppo_megatron.train.actor.optimizer import UpdateResult

    results, kept = {}, UpdateResult(0.0, 0.0, skipped=False, overflowed=False)
    for name, layout in LAYOUTS[rank.world_size].items():
        with rank.actor(**layout, distributed_optimizer=False) as actor:
            _double(actor)
            for kind, k, masks in CASES:
                sequences, _ = given(k, masks)
                batches = [
                    pack_sequences(sequences[first : first + 4], share_prefixes=actor.shares_prefixes)
                    for first in range(0, len(sequences), 4)
                ]
                objective = build_objective("pg_is", **settings(kind))
                with mock.patch.object(module, "optimizer_step", return_value=kept), InDouble():
                    stats = actor.train_update(batches, objective)
                results[name, kind, k, masks] = stats.loss, _exported(actor)
    return results


def _double(actor) -> None:
    """From now on the actor computes in fp64. A weight of another dtype loses the hook that sums its gradients."""
    for chunk in actor.model_chunks:
        for parameter in chunk.double().parameters():
            parameter.register_post_accumulate_grad_hook(_add_to_main_gradient)
    actor.transformer.pipeline_dtype = torch.float64
    actor.packer = replace(actor.packer, dtype=torch.float64)


def _add_to_main_gradient(parameter: torch.nn.Parameter) -> None:
    parameter.main_grad += parameter.grad
    parameter.grad = None


def _exported(actor) -> dict[str, np.ndarray]:
    """The gradients of the whole model, by Hugging Face's names of the weights."""
    from dppo_megatron.common.ranks import Ranks
    from dppo_megatron.hf.export import export_weights

    weights = [(p, p.data) for chunk in actor.model_chunks for p in chunk.parameters()]
    for parameter, _ in weights:
        parameter.data = parameter.main_grad
    own = {name: tensor.detach().clone() for name, tensor in export_weights(actor.model_chunks, actor.hf)}
    for parameter, weight in weights:
        parameter.data = weight
    return {name: tensor for part in Ranks().gather(own, "the gradients") for name, tensor in part.items()}


EXACT = 1e-6  # relative; gradients are summed in fp32


@pytest.fixture(scope="module")
def reference(models):
    """f(kind, k, masks) -> the loss and the gradient of every weight, by transformers in float64."""
    model = AutoModelForCausalLM.from_pretrained(models / "qwen3", dtype=torch.float64)

    @functools.cache
    def computed(kind: str, k: int, masks: bool):
        sequences, dense = given(k, masks)
        model.zero_grad()
        with InDouble():
            rows = []
            for s in sequences:
                ids = torch.tensor([*s.prompt_ids, *s.response_ids])
                rows.append(model(ids[None]).logits[0, len(s.prompt_ids) - 1 : -1])
            logits = torch.cat(rows) / TEMPERATURE
        loss = dense_loss(ObjectiveSettings(**settings(kind)), dense, logits).mean()
        loss.backward()
        return float(loss.detach()), {name: p.grad.clone() for name, p in model.named_parameters()}

    return computed


@pytest.mark.parametrize(
    ("size", "layout"),
    [(1, name) for name in LAYOUTS[1]] + [pytest.param(2, name, marks=pytest.mark.slow) for name in LAYOUTS[2]],
)
def test_gradients_are_those_of_the_whole_vocabulary(on, reference, size, layout):
    """K = V is the divergence itself. Packed micro-batches with an engine's list, with and without sampling masks."""
    for case in CASES:
        loss, own = on(size, gradients)[layout, *case]
        expected, exact = reference(*case)
        if case[0] != "sampled":  # the loss of an advantage is no divergence
            assert loss == pytest.approx(expected, rel=EXACT), case
        assert own.keys() == exact.keys()
        error = sum((own[name].double() - exact[name]).square().sum() for name in exact).sqrt()
        assert error < EXACT * sum(gradient.square().sum() for gradient in exact.values()).sqrt(), case


def test_a_padded_id_takes_no_place_among_the_most_likely_tokens():
    """Its logit is 0, above those of all tokens."""
    from dppo_megatron.train.actor.forward import MostLikelyStep

    logits = torch.tensor([[-5.0, -1.0, -3.0, -2.0, 0.0, 0.0]])
    rows = TokenBatch(
        token_ids=torch.zeros(1, dtype=torch.int32),
        position_ids=torch.zeros(1, dtype=torch.int32),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        target_ids=torch.tensor([0]),
        mask=torch.ones(1, dtype=torch.bool),
        loss_weight=torch.ones(1),
    )
    layout = SimpleNamespace(tensor_rank=0, tensor_size=1, tensor_group=None)
    model = SimpleNamespace(fused_head=False, exact=False)
    step = MostLikelyStep(vocab_size=4, layout=layout, k=2)
    _, values, ids = step.columns(rows, model, logits.clone())
    assert ids.tolist() == [[1, 3]]
    torch.testing.assert_close(values, logits[:, :4].log_softmax(1)[:, [1, 3]])
