"""What differs between Megatron-core releases, and which implementations this installation has.

Written for 0.16 (Python 3.11) to 0.19, which imports Triton on CPUs too. Everything the rest of the package takes from
Megatron under a changing name or signature is taken here.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

from megatron.core import __version__ as version
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from .engine_library import load_problem

_OLDEST, _NEWEST = (0, 16), (0, 19)


def unsupported_version() -> str | None:
    """Why this Megatron-core release cannot be used, or None."""
    release = tuple(int(part) for part in version.split(".")[:2])
    if _OLDEST <= release <= _NEWEST:
        return None
    return f"megatron-core {version}: supported are {_dotted(_OLDEST)} to {_dotted(_NEWEST)}"


def has_transformer_engine() -> bool:
    """Whether it is installed and loads."""
    return not load_problem() and importlib.util.find_spec("transformer_engine") is not None


def engine_remedy() -> str:
    """Why there is no TransformerEngine here, and the remedy."""
    if problem := load_problem():
        return f"it is installed but does not load ({problem}); install it again for this torch"
    return "it is not installed; install it"


def has_nvidia_apex() -> bool:
    """NVIDIA's apex, by its own extension module; the package index's `apex` is something else."""
    return importlib.util.find_spec("amp_C") is not None


def has_fused_weight_gradient() -> bool:
    """apex's kernel that adds weight gradients into the fp32 buffer; the head layer insists on it."""
    return importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None


def block_spec(config: TransformerConfig, transformer_engine: bool, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Layers of this pipeline stage (and virtual stage), dense and expert layers where the config has them."""
    # 0.16 sets it where TransformerEngine is absent too, and then builds instances of its classes.
    multi_latent_attention.HAVE_TE = has_transformer_engine()
    return get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=transformer_engine,
        normalization=config.normalization,
        **_select_accepted(get_gpt_decoder_block_spec, vp_stage=vp_stage),
    )


def replicated_linear() -> type:
    """A linear layer that every tensor-parallel rank holds whole: what latent attention accepts beside sharded ones."""
    if multi_latent_attention.Linear is None:
        # From 0.17 on its name is left out where TransformerEngine is absent, though nothing of that is in it.
        from megatron.core.post_training.modelopt.layers import Linear

        multi_latent_attention.Linear = Linear
    return multi_latent_attention.Linear


def drop_replay_registry() -> None:
    """Forget the routers that registered themselves: Megatron's list of them is of the process, not of a model."""
    RouterReplay.global_router_replay_instances.clear()


def _select_accepted(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Those of `arguments` that this release's `function` takes."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in parameters}


def _dotted(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
