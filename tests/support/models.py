"""Provides tiny models of every family: config.json, and Megatron's GPTModel (local layer spec)."""

import torch
import torch.nn.functional as F

from dppo_megatron.hf import HFModelConfig
from dppo_megatron.hf.transformer_fields import transformer_fields, uncompared_fields
from tests.support.actor_cases import TINY
from tests.support.published import read_models

FAMILIES = read_models("tiny_families", known={name: TINY[name] for name in TINY if name.startswith(".")})
CONFIGS = {name: config for name, config in FAMILIES.items() if not name.startswith(".")}
EXPERT_FAMILIES = tuple(name for name, config in CONFIGS.items() if {"num_experts", "n_routed_experts"} & config.keys())


def build_gpt(
    hf: HFModelConfig, tp: int = 1, pp: int = 1, vpp: int | None = None, ep: int = 1, etp: int | None = None
) -> list:
    """Build this rank's chunks of an fp32 GPTModel. Parallel state must be initialized with these sizes."""
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config = _transformer_config(hf, tp, pp, vpp, ep, etp or (1 if ep > 1 else tp))
    chunks = []
    for stage in range(vpp or 1):
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage if vpp else None
        )
        if hf.mla is not None:
            _latent_attention_without_te(spec)
        if hf.delta_net is not None or hf.sinks is not None:
            _own_layers(spec, hf, get_transformer_layer_offset(config, stage if vpp else None))
        chunks.append(
            GPTModel(
                config=config,
                transformer_layer_spec=spec,
                vocab_size=-(-hf.vocab_size // tp) * tp,
                max_sequence_length=64,
                pre_process=ps.get_pipeline_model_parallel_rank() == 0 and stage == 0,
                post_process=ps.get_pipeline_model_parallel_rank() == pp - 1 and stage == (vpp or 1) - 1,
                share_embeddings_and_output_weights=hf.tied_embeddings,
                position_embedding_type="rope" if hf.delta_net is None and hf.sinks is None else "none",
                rotary_base=hf.rope_theta,
                rotary_percent=hf.partial_rotary_factor,
                vp_stage=stage if vpp else None,
            )
        )
        chunks[-1].hf = hf
    return chunks


def _own_layers(spec, hf: HFModelConfig, offset: int) -> None:
    """Use the trainer's layers, because Megatron has gated delta net and norms for it only with TransformerEngine."""
    from dppo_megatron.train.actor.local.attention import PackedAttention, SinkAttention
    from dppo_megatron.train.actor.model import _use_delta_net, _use_own_modules

    _use_own_modules(spec, PackedAttention if hf.sinks is None else SinkAttention)
    if hf.delta_net is not None:
        _use_delta_net(spec, hf.delta_net.layers[offset:])


def _packed(hf: HFModelConfig, token_ids: torch.Tensor):
    from dppo_megatron.hf import inverse_frequencies
    from dppo_megatron.train.actor.batch.packing import Packer, sequence

    packer = Packer(torch.device("cpu"), torch.float32, inverse_frequencies(hf), delta_net=hf.delta_net is not None)
    return packer(sequence(token_ids[0].numpy())).packed


def _latent_attention_without_te(spec) -> None:
    from megatron.core.transformer import multi_latent_attention

    # Megatron sets HAVE_TE even without TransformerEngine, and then uses TransformerEngine.
    multi_latent_attention.HAVE_TE = isinstance(multi_latent_attention.TELinear, type)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = CausalAttention


class CausalAttention(torch.nn.Module):
    """Computes core attention with values narrower than keys, which Megatron has only in TransformerEngine."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **_):
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, query, key, value, attention_mask=None, **_):
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [s, b, h, d] -> [b, h, s, d]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale)
        return out.permute(2, 0, 1, 3).flatten(2)


def logits_of(chunk, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the logits [1, T, V / tp] of an unpacked sequence [1, T]. Needs a single pipeline stage."""
    length = token_ids.shape[1]
    mask = torch.ones(length, length).triu(1).bool()[None, None]
    own_layers = chunk.hf.delta_net is not None or chunk.hf.sinks is not None
    packed = {"packed_seq_params": _packed(chunk.hf, token_ids)} if own_layers else {}
    with torch.no_grad():
        return chunk(token_ids, torch.arange(length)[None], mask, **packed)


def _transformer_config(hf: HFModelConfig, tp: int, pp: int, vpp: int | None, ep: int, etp: int):
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    build = TransformerConfig if hf.mla is None else MLATransformerConfig
    return build(
        **transformer_fields(hf),
        **uncompared_fields(hf),
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        sequence_parallel=False,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=False,
    )
