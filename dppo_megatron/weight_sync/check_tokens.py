"""The weight check's tokens: trainer and engine score them, and equal log-probs mean equal weights."""

from __future__ import annotations

import numpy as np

from dppo_megatron.data.prompts import PromptSource

CHECK_TOKENS = 64


def weight_check_tokens(prompts: PromptSource, max_model_len: int) -> np.ndarray:
    """[S] int32, shorter than `max_model_len`: the run's first prompts end to end.

    Real text, and the same in every attempt of the run.
    """
    limit = min(CHECK_TOKENS, max_model_len - 1)
    tokens: list[int] = []
    for position in range(len(prompts)):
        tokens.extend(prompts.prompt(position).token_ids.tolist())
        if len(tokens) >= limit:
            break
    return np.array(tokens[:limit], dtype=np.int32)
