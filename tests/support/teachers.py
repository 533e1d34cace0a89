"""Checks a teacher's scores with transformers."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from dppo_megatron.types import Prompt, Rollout


@torch.no_grad()
def check_scores(given: Sequence[tuple[Prompt, Rollout]], model: Path) -> None:
    """Check that the teacher's columns are the scores of `model` in transformers. Sequences are padded at the end."""
    from transformers import AutoModelForCausalLM

    scorer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    whole = [np.concatenate([prompt.token_ids, rollout.token_ids]) for prompt, rollout in given]
    tokens = torch.tensor(np.stack([np.pad(ids, (0, max(map(len, whole)) - len(ids))) for ids in whole])).long()
    logprobs = torch.cat([scorer(part).logits.log_softmax(-1) for part in tokens.split(256)])
    for (prompt, rollout), scores in zip(given, logprobs, strict=True):
        exact = scores[len(prompt.token_ids) - 1 :][: len(rollout.token_ids)]
        assert np.abs(rollout.teacher_logprob - exact[range(len(exact)), rollout.token_ids].numpy()).max() < 1e-4
        listed = exact.gather(1, torch.tensor(rollout.teacher_ids).long())
        assert np.abs(rollout.teacher_topk_logprob - listed.numpy()).max() < 1e-4
        k = rollout.teacher_ids.shape[1]
        assert (exact.topk(k).values - listed.sort(descending=True).values).abs().max() < 1e-4
