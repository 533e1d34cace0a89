"""Defines the dense families, which differ only in attention biases and norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dppo_megatron.hf.raw_config import RawConfig

from .common import missing_null
from .family import Family


class MistralConfig(RawConfig):
    sliding_window: int | None = None

    def problems(self, raw: Mapping[str, Any]) -> list[str]:
        if "sliding_window" not in raw:  # readers then assume 4096
            return [missing_null("sliding_window")]
        if self.sliding_window is None:
            return []
        return [f"sliding_window = {self.sliding_window}: sliding-window attention is not supported"]


DENSE = (
    Family("qwen2", "Qwen2ForCausalLM", qkv_bias=True),  # Qwen2 and Qwen2.5
    Family("qwen3", "Qwen3ForCausalLM", qk_norm=True, head_dim=128),
    Family("llama", "LlamaForCausalLM", rope_types=("default", "llama3")),  # Llama 3 and 2
    Family("mistral", "MistralForCausalLM", raw=MistralConfig),  # 7B from v0.2 on, Nemo, Small 3.0
)
