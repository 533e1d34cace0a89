"""Defines the dense families, which differ only in biases and norms of attention."""

from __future__ import annotations

from .family import Family

DENSE = (
    Family("qwen2", "Qwen2ForCausalLM", qkv_bias=True),  # Qwen2 and Qwen2.5
    Family("qwen3", "Qwen3ForCausalLM", qk_norm=True, head_dim=128),
    Family("llama", "LlamaForCausalLM", rope_types=("default", "llama3")),  # Llama 3 and 2
)
