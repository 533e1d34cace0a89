"""Describes a model family: the schema of its config.json, and the rules for its parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dppo_megatron.hf.hf_config import HFModelConfig
from dppo_megatron.hf.raw_config import RawConfig
from dppo_megatron.hf.rules import MegatronLayout, Rule

from .common import decoder_rules


@dataclass(frozen=True, slots=True)
class Family:
    """Describes one architecture. The defaults are those of a dense decoder with grouped queries and SwiGLU."""

    name: str  # config.json's `model_type`
    architecture: str  # the only name in config.json's `architectures`
    qkv_bias: bool = False
    qk_norm: bool = False  # a norm of each head's queries and keys
    head_dim: int | None = None  # default where config.json has none; None = hidden size / heads
    rope_types: tuple[str, ...] = ("default",)  # supported names of `raw_config.ROPE_TYPES`
    partial_rotary: float | None = None  # default share of a head's dimensions that is rotated; None = always all
    wrapper: str | None = None  # architecture of directories that have this model as `text_config`
    raw: type[RawConfig] = RawConfig  # the keys of its config.json
    rules: Callable[[HFModelConfig, MegatronLayout], tuple[Rule, ...]] = decoder_rules
