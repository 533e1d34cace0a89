"""Describes the precision of computations, the GPUs that support it, and the implementations that compute it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dppo_megatron.config.schema import Config

from . import megatron_version

Capability = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Describes an FP8 recipe of TransformerEngine, and the first GPUs that support the recipe."""

    capability: Capability
    scaling: str
    rows: int  # a matrix product needs a multiple of this number


RECIPES = {  # by Megatron's names, which the settings use too
    "tensorwise": Recipe((8, 9), "one scale a tensor, from its current values", 16),
    "blockwise": Recipe((9, 0), "one scale a block of 1 x 128 or 128 x 128", 16),
    "mxfp8": Recipe((10, 0), "one power of two for 32 values", 32),
}


def this_gpu() -> Capability | None:
    """Return the compute capability of this process's device; None without CUDA."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def precision_arguments(config: Config) -> dict[str, Any]:
    """Return the FP8 fields of a TransformerConfig: E4M3 forward, E5M2 for tensorwise gradients."""
    if config.model.fp8 == "none":
        return {}
    # Scales of small blocks follow the values, so gradients need no wider exponent.
    return {"fp8": "hybrid" if config.model.fp8 == "tensorwise" else "e4m3", "fp8_recipe": config.model.fp8}


def row_multiple(config: Config) -> int:
    """Return the number that divides the rows of every matrix product; experts pad their rows themselves."""
    return 1 if config.model.fp8 == "none" else RECIPES[config.model.fp8].rows


def capability_problems(config: Config, capability: Capability | None) -> list[str]:
    """Return why a device of `capability` (None = CPU) cannot compute as configured; ignores the installation."""
    m = config.model
    if m.fp8 == "none":
        return []
    needed = RECIPES[m.fp8].capability
    if capability is None:
        return [f"model.fp8 = {m.fp8}: needs a CUDA device; set it to none"]
    if capability >= needed:
        return []
    recipes = [name for name, recipe in RECIPES.items() if recipe.capability <= capability]
    remedy = f"use one of {', '.join(recipes)} or none" if recipes else "set it to none"
    return [
        f"model.fp8 = {m.fp8}: needs compute capability {_dotted(needed)} or newer, the GPU has "
        f"{_dotted(capability)}; {remedy}"
    ]


def installation_problems(config: Config) -> list[str]:
    """Return why this installation lacks a package that `config` needs."""
    if config.model.fp8 == "none" or megatron_version.has_transformer_engine():
        return []
    return [f"model.fp8 = {config.model.fp8}: needs TransformerEngine: {megatron_version.engine_remedy()}, or use none"]


def implementations(*, transformer_engine_layers: bool) -> str:
    """Name the implementations of layers, Adam, the gradient norm with clipping, and fp32 sums of weight gradients.

    In Megatron's order: TransformerEngine if it is installed, else NVIDIA's apex, else torch; on the CPU always torch.
    apex is recognized by its extension modules, because `apex` in the package index is a web toolkit.
    """
    engine, apex = megatron_version.has_transformer_engine(), megatron_version.has_nvidia_apex()
    if not torch.cuda.is_available():
        engine = apex = False
    fused = "TransformerEngine" if engine else "NVIDIA apex" if apex else "torch"
    layers, gradient = "local", "NVIDIA apex" if fuses_weight_gradient() else "torch"
    if transformer_engine_layers:
        layers = gradient = "TransformerEngine"
    return f"layers {layers}, Adam {fused}, gradient norm {fused}, weight gradients {gradient}"


def fuses_weight_gradient() -> bool:
    """Return whether Megatron's layers, such as the head, add weight gradients to the fp32 buffer.

    apex's kernel adds them inside the matrix product. Without apex these layers reject the setting.
    """
    return torch.cuda.is_available() and megatron_version.has_fused_weight_gradient()


def fuse_weight_gradients(layers: nn.Module) -> None:
    """Let TransformerEngine's layers add weight gradients to the fp32 buffer too; they need no apex for this.

    Megatron has one setting for these layers and the head. Without the setting each micro-batch's gradient would be
    rounded to the parameters' dtype before it is added. The modules read the attribute in every forward pass.
    """
    for module in layers.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True  # type: ignore[assignment]


def describe(config: Config) -> str:
    """Describe the dtypes of every part in a log line."""
    m = config.model
    parts = [f"{m.dtype} parameters and activations"]
    if m.fp8 != "none":
        parts.append(f"FP8 matrix products ({m.fp8}: {RECIPES[m.fp8].scaling})")
    if m.fp32_head:
        parts.append("fp32 head")
    if m.batch_invariant_head:
        parts.append("batch-invariant head")
    if m.dtype == "fp16":
        scale = config.optimizer.loss_scale
        parts.append(f"loss scale {scale.initial:g}, doubled after {scale.growth_interval} updates without an overflow")
    return ", ".join([*parts, "fp32 gradients and optimizer"])


def _dotted(capability: Capability) -> str:
    return ".".join(map(str, capability))
