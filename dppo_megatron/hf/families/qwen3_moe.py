"""Defines Qwen3-MoE: Qwen3's attention, with experts in most layers."""

from __future__ import annotations

from pydantic import AliasChoices, Field

from dppo_megatron.hf.hf_config import MoEConfig
from dppo_megatron.hf.raw_config import Experts, RawConfig, Size

from .family import Family


class Qwen3MoeConfig(RawConfig):
    num_experts: Experts = Field(validation_alias=AliasChoices("num_experts", "num_local_experts"))
    num_experts_per_tok: Size
    moe_intermediate_size: Size
    decoder_sparse_step: Size = 1
    mlp_only_layers: list[int] = Field([])
    norm_topk_prob: bool = False

    def experts(self) -> MoEConfig:
        step, dense = self.decoder_sparse_step, self.mlp_only_layers
        return MoEConfig(
            num_experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            ffn_hidden_size=self.moe_intermediate_size,
            layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(self.num_hidden_layers)),
            norm_topk_prob=self.norm_topk_prob,
        )


QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", qk_norm=True, raw=Qwen3MoeConfig)
