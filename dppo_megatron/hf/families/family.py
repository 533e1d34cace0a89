"""Describes a model family: the config.json schema and the parameter rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dppo_megatron.hf.hf_config import HFModelConfig
from dppo_megatron.hf.raw_config import RawConfig
from dppo_megatron.hf.rules import MegatronLayout, Rule

from .common import decoder_rules


@dataclass(frozen=True, slots=True)
class Family:
    """Describes an architecture. The defaults describe a dense decoder with grouped queries and SwiGLU."""

    name: str  # config.json's `model_type`
    architecture: str  # the only name in config.json's `architectures`
    qkv_bias: bool = False
    qk_norm: bool = False  # a norm on each head's queries and keys
    head_dim: int | None = None  # default where config.json has none; None = hidden size / heads
    rope_types: tuple[str, ...] = ("default",)  # supported names in `raw_config.ROPE_TYPES`
    partial_rotary: float | None = None  # default rotated share of each head's dimensions; None = always all
    wrapper: str | None = None  # architecture of directories that have this model as `text_config`
    raw: type[RawConfig] = RawConfig  # config.json keys
    rules: Callable[[HFModelConfig, MegatronLayout], tuple[Rule, ...]] = decoder_rules
