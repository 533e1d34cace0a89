"""One process trains on a bank with sampling masks as a dense float64 reference does."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from dppo_megatron.bank import BankReader
from dppo_megatron.objectives import TopKLogprobs, build_objective, sequence_ids_from_cu_seqlens
from dppo_megatron.train.trainer.batches import BankBatches
from dppo_megatron.types import TokenBatch
from tests.parallel.cases import TEMPERATURE, sections
from tests.support.actor_cases import actor_config

CASES = ("kept", "taught")


def dense(model: torch.nn.Module, batch: TokenBatch, objective) -> torch.Tensor:
    """Return the loss by a softmax over the whole vocabulary with -inf outside the sampling masks."""
    logits = []
    for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        logits.append(model(batch.token_ids[None, start:end]).logits[0])
    rows = batch.mask.nonzero().flatten()
    kept = torch.zeros(len(batch.mask), logits[0].shape[1], dtype=torch.bool)
    kept[torch.arange(len(kept)).repeat_interleave(batch.sampling_mask_counts), batch.sampling_mask_ids.long()] = True
    logprobs = (torch.cat(logits) / TEMPERATURE)[rows].masked_fill(~kept[rows], -torch.inf).log_softmax(1)
    finite = logprobs.masked_fill(~kept[rows], 0.0)
    target, more = batch.target_ids[rows], {}

    def listed(ids: torch.Tensor, theirs: torch.Tensor) -> TopKLogprobs:
        named = torch.zeros_like(kept[rows]).scatter(1, target[:, None], True)
        for column in ids[rows].long().T:
            named |= torch.nn.functional.one_hot(column.clamp(min=0), kept.shape[1]).bool() & (column >= 0)[:, None]
        rest = (finite.exp() * (kept[rows] & ~named)).sum(1)
        return TopKLogprobs(
            ids=ids[rows],
            rollout_logprob=theirs[rows].double(),
            logprob=finite.gather(1, ids[rows].long().clamp(min=0)),
            other_logprob=torch.where(rest > 0, torch.where(rest > 0, rest, 1.0).log(), -torch.inf),
            target_ids=target,
            vocab_size=batch.sampling_mask_counts[rows],
        )

    if objective.needs_teacher:
        columns = {name: batch.tensors[f"teacher_{name}"] for name in ("ids", "topk_logprob", "logprob")}
        more = {"teacher": listed(columns["ids"], columns["topk_logprob"]), "teacher_logprob": columns["logprob"][rows]}
    out = objective(
        logprob=finite.gather(1, target[:, None])[:, 0],
        mask=batch.mask[rows],
        rollout_logprob=batch.rollout_logprob[rows].double(),
        advantage=batch.advantage[rows].double(),
        topk=listed(batch.topk_ids, batch.rollout_topk_logprob),
        sequence_ids=sequence_ids_from_cu_seqlens(batch.cu_seqlens, len(batch.mask))[rows],
        entropy=-(finite.exp() * finite * kept[rows]).sum(1),
        **more,
    )
    return (batch.loss_weight[rows].double() * out.loss).sum()


@pytest.mark.parallel
@pytest.mark.parametrize("variant", CASES)
def test_one_process_computes_the_dense_reference(trained, models, variant):
    config = actor_config(models / "qwen3", sections=sections(models.parent / "banks" / "qwen3+kept", variant))
    objective = build_objective(config.objective.name, **config.objective.settings)
    (update,) = BankBatches(config, BankReader(config.rollout.bank), objective, 0, 1).read(0).updates
    counts = torch.cat([batch.sampling_mask_counts[batch.mask] for batch in update.micro_batches])
    assert counts.min() < config.rollout.topk_logprobs < counts.max() <= 12
    model = AutoModelForCausalLM.from_pretrained(models / "qwen3", dtype=torch.float64)
    loss = sum(dense(model, batch, objective) for batch in update.micro_batches)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    run = trained(f"qwen3+{variant}:one")
    assert run["loss"][0] == pytest.approx(float(loss), rel=1e-5)
    assert run["grad_norm"][0] == pytest.approx(float(norm), rel=1e-5)
