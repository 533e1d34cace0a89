"""Defines GLM-4.5 to 4.7 (grouped queries, half of each head rotated) and GLM-4.7-Flash (latent attention).

Both have DeepSeek-V3's experts and router.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .common import SigmoidExpertsConfig
from .deepseek_v3 import DeepseekV3Config, rules
from .family import Family


class Glm4MoeConfig(SigmoidExpertsConfig):
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False  # for queries, keys and values; the output projection has no bias
    use_qk_norm: bool = False

    def qkv_bias(self) -> bool:
        return self.attention_bias

    def qk_norm(self) -> bool:
        return self.use_qk_norm


class Glm4MoeLiteConfig(DeepseekV3Config):
    rms_norm_eps: float = 1e-5
    mlp_layer_types: list[str] | None = None

    def problems(self, raw: Mapping[str, Any]) -> list[str]:
        # vLLM reads first_k_dense_replace, transformers mlp_layer_types, by default ["dense", "sparse", ...].
        dense = self.first_k_dense_replace
        kinds = self.mlp_layer_types or ["dense", *["sparse"] * (self.num_hidden_layers - 1)]
        out = super().problems(raw)
        if kinds != ["dense" if i < dense else "sparse" for i in range(self.num_hidden_layers)]:
            out.append(f"first_k_dense_replace = {dense}: mlp_layer_types (default: only the first is dense) differs")
        return out


GLM4_MOE = (
    Family("glm4_moe", "Glm4MoeForCausalLM", partial_rotary=0.5, raw=Glm4MoeConfig),
    Family("glm4_moe_lite", "Glm4MoeLiteForCausalLM", raw=Glm4MoeLiteConfig, rules=rules),
)
