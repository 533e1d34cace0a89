"""Rules of what engines can serve, from the model's config.json."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dppo_megatron.config import Config

if TYPE_CHECKING:
    from dppo_megatron.hf import HFModelConfig


def problems(config: Config, hf: HFModelConfig | None) -> list[str]:
    """Both servers split attention by whole heads, and FP8 by whole blocks. `hf`: None for an unreadable model."""
    from dppo_megatron.hf import fp8
    from dppo_megatron.hf.peft import adapter_shapes

    if not config.samples or hf is None:
        return []
    engine, out = config.engine, []
    setting, response = max(config.response_tokens.items(), key=lambda item: item[1])
    prompt, positions = config.data.max_prompt_tokens, hf.max_position_embeddings
    if max(prompt + response, engine.max_model_len) > positions:
        wrong, remedy = f"engine.max_model_len = {engine.max_model_len}", "remove it, or lower it to that"
        if prompt + response > positions:
            wrong, remedy = f"data.max_prompt_tokens = {prompt} + {setting} = {response}", "lower one of them"
        out.append(f"{wrong}: the model was made for {positions} positions (max_position_embeddings); {remedy}")
    if unknown := [token for token in config.rollout.stop_token_ids if token >= hf.vocab_size]:
        out.append(
            f"rollout.stop_token_ids = {unknown[0]}: the model has the tokens 0 to {hf.vocab_size - 1}, so no response "
            "would stop there; correct or remove it"
        )
    if config.rollout.topk_logprobs > hf.vocab_size:
        out.append(
            f"rollout.topk_logprobs = {config.rollout.topk_logprobs}: the model has {hf.vocab_size} tokens; set it to "
            "at most that"
        )
    if config.weight_sync.lora == "adapter" and (hf.moe is not None or hf.mla is not None):
        out.append(
            "weight_sync.lora = adapter: no engine here multiplies by adapters of experts or of latent attention; "
            "set it to merged"
        )
    if (
        config.weight_sync.lora == "adapter"
        and engine.kind == "sglang"
        and _in_part(adapter_shapes(hf, config.model.lora))
    ):
        out.append(
            f"model.lora.targets = {', '.join(config.model.lora.targets)}: of layers that it fuses, SGLang takes "
            "adapters with q_proj and v_proj, or with gate_proj, alone; name those too, or set weight_sync.lora to "
            "merged"
        )
    tensor, kv_heads = engine.tensor_parallel, hf.num_kv_heads
    if hf.num_heads % tensor:
        out.append(f"engine.tensor_parallel = {tensor}: does not divide {hf.num_heads} attention heads; lower it")
    elif hf.mla is None and kv_heads % tensor and tensor % kv_heads:
        out.append(
            f"engine.tensor_parallel = {tensor}: {kv_heads} key-value heads are neither a multiple nor a divisor of "
            "it; change it"
        )
    if engine.pipeline_parallel > hf.num_layers:
        out.append(
            f"engine.pipeline_parallel = {engine.pipeline_parallel}: the model has {hf.num_layers} layers; lower it"
        )
    if engine.expert_parallel and (hf.moe is None or hf.moe.num_experts % tensor):
        experts = 0 if hf.moe is None else hf.moe.num_experts
        out.append(
            f"engine.expert_parallel = true: {tensor} GPUs cannot share {experts} experts evenly; set it to false"
        )
    if engine.serves_fp8:
        out += [
            f"engine.tensor_parallel = {tensor}: shards {name} = {width} into parts that are no multiple of the "
            f"{fp8.BLOCK} values of an FP8 block; {'lower it, or ' * (tensor > 1)}set engine.quantization to none"
            for name, width in _feed_forwards(hf).items()
            if width % (tensor * fp8.BLOCK) and not (engine.expert_parallel and name.startswith("moe"))
        ]
    return out


def _in_part(names: Iterable[str]) -> bool:
    """Whether an adapter of these tensors, in PEFT's names, has a part of a fused layer that SGLang does not take."""
    layers: dict[str, set[str]] = {}
    for name in names:
        module, _, _ = name.partition(".lora_")
        block, _, projection = module.rpartition(".")
        layers.setdefault(block, set()).add(projection)
    return any(
        ("q_proj" in found) != ("v_proj" in found)
        or ("k_proj" in found and "q_proj" not in found)
        or ("up_proj" in found and "gate_proj" not in found)
        for found in layers.values()
    )


def _feed_forwards(hf: HFModelConfig) -> dict[str, int]:
    """Widths of those that the model has, by their names in config.json."""
    if hf.moe is None:
        return {"intermediate_size": hf.ffn_hidden_size}
    widths = {"moe_intermediate_size": hf.moe.ffn_hidden_size}
    if not all(hf.moe.layers):
        widths["intermediate_size"] = hf.ffn_hidden_size
    return widths
