"""Whether a Megatron model computes what config.json describes, field by field: shapes do not show everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .hf_config import HFModelConfig
from .megatron_model import unwrap
from .rope import inverse_frequencies
from .transformer_fields import transformer_fields


def disagreements(model_chunks: Sequence[nn.Module], config: HFModelConfig) -> list[str]:
    """Every field where the TransformerConfig of the chunks differs from `config`, one line each.

    Chunks without a `config` attribute, and fields that a Megatron version does not have, are skipped.
    """
    out = []
    for chunk in map(unwrap, model_chunks):
        megatron = getattr(chunk, "config", None)
        for name, wanted in transformer_fields(config).items():
            found = getattr(megatron, name, wanted)
            if found != wanted:
                out.append(_line(name, found, wanted))
        rotary_base = getattr(chunk, "rotary_base", config.rope_theta)
        if rotary_base != config.rope_theta:
            out.append(_line("rotary_base", rotary_base, config.rope_theta))
        out += _frequencies(chunk, config)
    return sorted(set(out))


def _frequencies(chunk: nn.Module, config: HFModelConfig) -> list[str]:
    """Megatron scales rotary frequencies with constants that no field shows, so the frequencies are compared."""
    found = getattr(getattr(chunk, "rotary_pos_emb", None), "inv_freq", None)
    if found is None or config.rope_type not in ("default", "llama3"):
        return []
    wanted = inverse_frequencies(config, config.mla.qk_rope_head_dim if config.mla else config.head_dim)
    if found.shape == wanted.shape and torch.allclose(found.cpu().float(), wanted, rtol=1e-4, atol=0):
        return []
    scaling = ", ".join(f"{k} = {v}" for k, v in config.rope_scaling.items())
    return [
        f"rotary frequencies of the Megatron model are not those of rope_type = {config.rope_type!r}, rope_theta = "
        f"{config.rope_theta:g}{', ' if scaling else ''}{scaling} in config.json"
    ]


def _line(name: str, found: Any, wanted: Any) -> str:
    return f"{name} = {found!r} in the Megatron model, {wanted!r} by config.json"
