"""token_statistics with rows that carry no loss."""

from __future__ import annotations

import pytest
import torch

from dppo_megatron.vocab_parallel import token_statistics


def test_rows_without_loss_may_hold_anything():
    """As in the fused head: -100 as target, any ids, a temperature of 0, nan logits; 0 comes out, and no gradient."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 9, generator=generator, dtype=torch.float64)
    target, topk = torch.arange(6), torch.arange(12).view(6, 2) % 9
    keep = torch.tensor([True, False, True, False, False, True])
    temperature = torch.full((6,), 1.3)
    dirty = torch.where(keep[:, None], logits, torch.nan).requires_grad_()
    masked = token_statistics(
        dirty,
        torch.where(keep, target, -100),
        torch.where(keep[:, None], topk, 99),
        temperature=torch.where(keep, temperature, 0.0),
        entropy="differentiable",
        loss_mask=keep,
    )
    clean = logits[keep].requires_grad_()
    alone = token_statistics(clean, target[keep], topk[keep], temperature=temperature[keep], entropy="differentiable")
    for name in ("logprob", "entropy", "topk_logprob", "other_logprob"):
        assert torch.equal(getattr(masked, name)[keep], getattr(alone, name)), name
        assert not getattr(masked, name)[~keep].any(), name
    assert not masked.nonfinite.any()
    for stats in (masked, alone):
        (stats.logprob.sum() + stats.entropy.sum() + stats.topk_logprob.sum() + stats.other_logprob.sum()).backward()
    assert torch.equal(dirty.grad[keep], clean.grad)
    assert not dirty.grad[~keep].any()
    with pytest.raises(ValueError, match=r"target_ids must be within"):
        token_statistics(logits, torch.where(keep, target, -100))
    with pytest.raises(ValueError, match="loss_mask must be bool"):
        token_statistics(logits, target, loss_mask=torch.ones(6))
