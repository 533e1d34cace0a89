"""Rules of `engine.exact`: settings with which engine and trainer would not compute the same bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dppo_megatron.config import Config

if TYPE_CHECKING:
    from dppo_megatron.hf import HFModelConfig

WHAT = "engine.exact = true"
REMEDY = "or set engine.exact to false"


def problems(config: Config) -> list[str]:
    if not config.engine.exact:
        return []
    e, m, p = config.engine, config.model, config.parallel
    why_not = (
        (m.dtype not in ("fp32", "bf16"), f"there are operators for fp32 and bf16; set model.dtype (now {m.dtype})"),
        (
            e.dtype != m.dtype,
            f"engine and trainer compute in one precision; set engine.dtype (now {e.dtype}) to {m.dtype}",
        ),
        (
            e.quantization != "none" or m.fp8 != "none",
            "nothing is rounded to FP8; set engine.quantization and model.fp8 to none",
        ),
        (
            m.layers == "transformer_engine",
            "the operators are those of the local layers; set model.layers to local or auto",
        ),
        (
            m.logits == "fused",
            "the fused head multiplies as many rows at once as there are; set model.logits to stored",
        ),
        (
            m.batch_invariant_head,
            "the engine's head does not multiply in tiles of that setting; set model.batch_invariant_head to false",
        ),
        (
            m.lora.r > 0,
            "adapters are products of their own in the trainer, merged in the engine; set model.lora.r to 0",
        ),
        (e.devices > 1, "the engine adds up what its own shards give; set engine.tensor_parallel to 1"),
        (
            p.tensor > 2,
            f"of more than two ranks gloo adds in an order of its own; set parallel.tensor (now {p.tensor}) to 1 or 2",
        ),
        (p.context > 1, "ranks have parts of each sequence; set parallel.context to 1"),
        (
            config.rollout.has_sampling_mask,
            "log-probs over what top-p, top-k and min-p left are the engine's own; set them to 1, -1 and 0",
        ),
    )
    return [f"{WHAT}: {why}, {REMEDY}" for is_so, why in why_not if is_so]


def model_problems(config: Config, hf: HFModelConfig | None, *, elsewhere: bool) -> list[str]:
    """Return properties of the model that `engine.exact` does not support.

    `elsewhere`: the run has other devices than this machine.
    """
    import torch

    if not config.engine.exact:
        return []
    gpus = config.slurm.gpus_per_node > 0 if elsewhere else torch.cuda.is_available()
    out = [(gpus, "the operators are those of CPUs, and GPUs have none of them; run without GPUs")]
    if hf is not None:
        out += [
            (
                hf.moe is not None,
                "experts: router, experts' products and the sum of a token's experts have no operator that both sides "
                "share; use a dense model",
            ),
            (hf.mla is not None, "latent attention has no operator that both sides share; use another model"),
        ]
    return [f"{WHAT}: {why}, {REMEDY}" for is_so, why in out if is_so]
