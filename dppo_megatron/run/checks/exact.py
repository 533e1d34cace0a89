"""Checks `engine.exact`: rejects settings that make engine and trainer compute different bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dppo_megatron.config import Config

if TYPE_CHECKING:
    from dppo_megatron.hf import HFModelConfig


def problems(config: Config) -> list[str]:
    if not config.engine.exact:
        return []
    e, m, p = config.engine, config.model, config.parallel
    dtypes, masks, wide = m.dtype in ("fp32", "bf16"), config.rollout.has_sampling_mask, p.tensor > 2
    casts, rounds = e.dtype != m.dtype, e.quantization != "none" or m.fp8 != "none"
    other_layers, fused, tiled = m.layers == "transformer_engine", m.logits == "fused", m.batch_invariant_head
    wrong = {
        f"only fp32 and bf16 have shared operators; set model.dtype (now {m.dtype})": not dtypes,
        f"engine and trainer must compute in one precision; set engine.dtype (now {e.dtype}) to {m.dtype}": casts,
        "the shared operators do not round to FP8; set engine.quantization and model.fp8 to none": rounds,
        "the shared operators are those of the local layers; set model.layers to local or auto": other_layers,
        "the fused head's results depend on the number of rows; set model.logits to stored": fused,
        "the engine's head does not use the tiles of this setting; set model.batch_invariant_head to false": tiled,
        "the trainer multiplies by adapters separately, and the engine merges them; set model.lora.r to 0": m.lora.r,
        "the engine sums its shards in its own order; set engine.tensor_parallel to 1": e.devices > 1,
        f"gloo sums more than two ranks in its own order; set parallel.tensor (now {p.tensor}) to 1 or 2": wide,
        "each rank has only a part of each sequence; set parallel.context to 1": p.context > 1,
        "the engine computes log-probs over a sampling mask with its own operators; set rollout.top_p, "
        "top_k and min_p to 1, -1 and 0": masks,
    }
    return _described(wrong)


def model_problems(config: Config, hf: HFModelConfig | None, *, elsewhere: bool) -> list[str]:
    """Return model properties that `engine.exact` does not support.

    `elsewhere` means that the run has other devices than this machine.
    """
    import torch

    if not config.engine.exact:
        return []
    gpus = config.slurm.gpus_per_node > 0 if elsewhere else torch.cuda.is_available()
    router = "the router, the experts' products and the sum of a token's experts have no shared operator"
    wrong = {
        "the shared operators exist only for CPUs; run without GPUs": gpus,
        f"{router}; use a dense model": hf and hf.moe,
        "gated delta net has no shared operator; use another model": hf and hf.delta_net,
        "latent attention has no shared operator; use another model": hf and hf.mla,
    }
    return _described(wrong)


def _described(wrong: Mapping[str, object]) -> list[str]:
    """Return a problem for each reason that holds."""
    return [f"engine.exact = true: {reason}, or set engine.exact to false" for reason, holds in wrong.items() if holds]
