"""What an engine cannot serve, known from the model's config.json before a server starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dppo_megatron.config import Config

if TYPE_CHECKING:
    from dppo_megatron.hf import HFModelConfig


def serving_problems(hf: HFModelConfig, config: Config) -> list[str]:
    """Each `setting = value: why; remedy`. Both servers split attention by whole heads."""
    engine, out = config.engine, []
    if engine.max_model_len > hf.max_position_embeddings:
        out.append(
            f"engine.max_model_len = {engine.max_model_len}: the model was made for {hf.max_position_embeddings} "
            f"positions (max_position_embeddings); set it to at most {hf.max_position_embeddings}"
        )
    tensor, kv_heads = engine.tensor_parallel, hf.num_kv_heads
    if hf.num_heads % tensor:
        out.append(f"engine.tensor_parallel = {tensor}: does not divide {hf.num_heads} attention heads; lower it")
    elif hf.mla is None and kv_heads % tensor and tensor % kv_heads:
        out.append(
            f"engine.tensor_parallel = {tensor}: {kv_heads} key-value heads are neither a multiple nor a divisor of "
            "it; change it"
        )
    return out
