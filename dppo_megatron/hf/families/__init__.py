"""One table per architecture.

To add a family: a file here with `family(config, layout) -> Family`, a line in FAMILIES, and one in
`hf_config.ARCHITECTURES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dppo_megatron.hf.hf_config import HFModelConfig
from dppo_megatron.hf.rules import Family, MegatronLayout

from . import deepseek_v3, llama, qwen2, qwen3, qwen3_moe

FAMILIES: Mapping[str, Callable[[HFModelConfig, MegatronLayout], Family]] = {
    "qwen2": qwen2.family,
    "qwen3": qwen3.family,
    "llama": llama.family,
    "qwen3_moe": qwen3_moe.family,
    "deepseek_v3": deepseek_v3.family,
}
