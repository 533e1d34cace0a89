"""Handles differences between Megatron-core releases, and detects the implementations of this installation.

Supports 0.16 (Python 3.11) to 0.19, which imports Triton on CPUs too. Only this module uses Megatron names and
signatures that change between releases.
"""

from __future__ import annotations

import importlib.util

from megatron.core import __version__ as version
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from .megatron_import import load_problem

_OLDEST, _NEWEST = (0, 16), (0, 19)


def unsupported_version() -> str | None:
    """Return why this Megatron-core release cannot be used, or None."""
    release = tuple(int(part) for part in version.split(".")[:2])
    if _OLDEST <= release <= _NEWEST:
        return None
    return f"megatron-core {version}: supported are {_dotted(_OLDEST)} to {_dotted(_NEWEST)}"


def has_transformer_engine() -> bool:
    """Return whether TransformerEngine is installed and loads."""
    return not load_problem() and importlib.util.find_spec("transformer_engine") is not None


def engine_remedy() -> str:
    """Return why there is no TransformerEngine here, and the remedy."""
    if problem := load_problem():
        return f"it is installed but does not load ({problem}); install it again for this torch"
    return "it is not installed; install it"


def has_nvidia_apex() -> bool:
    """Return whether NVIDIA's apex is installed, by its extension module; `apex` in the package index is unrelated."""
    return importlib.util.find_spec("amp_C") is not None


def has_fused_weight_gradient() -> bool:
    """Return whether apex's kernel that adds weight gradients to the fp32 buffer exists; the head layer needs it."""
    return importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None


def block_spec(config: TransformerConfig, transformer_engine: bool, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Return the layers of this pipeline stage (and virtual stage), dense and with experts, as in the config."""
    # 0.16 sets HAVE_TE even without TransformerEngine, and then builds instances of TransformerEngine classes.
    multi_latent_attention.HAVE_TE = has_transformer_engine()
    return get_gpt_decoder_block_spec(
        config, use_transformer_engine=transformer_engine, normalization=config.normalization, vp_stage=vp_stage
    )


def layer_offset(config: TransformerConfig, vp_stage: int | None, pipeline_rank: int) -> int:
    """Return the global index of a pipeline stage's (and virtual stage's) first layer."""
    return get_transformer_layer_offset(config, vp_stage, pipeline_rank)


def replicated_linear() -> type:
    """Return the class of unsharded linear layers, which latent attention accepts besides sharded layers."""
    if multi_latent_attention.Linear is None:
        # From 0.17 on the name is missing without TransformerEngine, although the class does not use TransformerEngine.
        from megatron.core.post_training.modelopt.layers import Linear

        multi_latent_attention.Linear = Linear
    return multi_latent_attention.Linear


def drop_replay_registry() -> None:
    """Clear Megatron's list of routers, because the list belongs to the process and not to a model."""
    RouterReplay.global_router_replay_instances.clear()


def _dotted(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
