"""Rules of what `model` is computed in. What a GPU can compute is `actor.precision.capability_problems`."""

from __future__ import annotations

from dppo_megatron.config import Config


def problems(config: Config) -> list[str]:
    m, out = config.model, []
    if m.fp8 != "none" and m.dtype != "bf16":
        out.append(f"model.fp8 = {m.fp8}: the rest is computed in bf16; set model.dtype to bf16")
    if m.fp8 != "none" and m.layers == "local":
        out.append(f"model.fp8 = {m.fp8}: local layers have no FP8; set model.layers to transformer_engine or auto")
    if m.dtype == "fp32" and m.layers == "transformer_engine":
        # FlashAttention and cuDNN take 16 bits, and TransformerEngine's own fallback no packed sequences (to 2.9).
        out.append(
            "model.dtype = fp32: TransformerEngine has no attention kernel for packed sequences in fp32; set "
            "model.dtype to bf16 or fp16, or model.layers to local"
        )
    if m.lora.r:
        out += _adapters(config)
    out += _loss_scale(config)
    if m.fp32_head and m.logits == "fused":
        out.append("model.fp32_head = true: the fused head multiplies in model.dtype; set model.logits to stored")
    return out


def _loss_scale(config: Config) -> list[str]:
    scale, out = config.optimizer.loss_scale, []
    if config.model.dtype != "fp16":
        return [
            f"optimizer.loss_scale.{name} = {value:g}: model.dtype = {config.model.dtype} has no loss scale; remove it "
            "or set model.dtype to fp16"
            for name, value in scale.model_dump().items()
            if value != type(scale).model_fields[name].default
        ]
    if scale.smallest > scale.initial:
        out.append(
            f"optimizer.loss_scale.smallest = {scale.smallest:g}: is more than optimizer.loss_scale.initial = "
            f"{scale.initial:g}; set it to that or less"
        )
    return out


def _adapters(config: Config) -> list[str]:
    m, out = config.model, []
    if m.layers == "transformer_engine":
        out.append(
            f"model.lora.r = {m.lora.r}: adapters stand beside Megatron's local layers alone; set model.layers to "
            "local or auto"
        )
    if m.fp8 != "none":
        out.append(f"model.lora.r = {m.lora.r}: local layers have no FP8; set model.fp8 to none")
    return out
