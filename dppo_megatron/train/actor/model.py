"""Builds the policy: Megatron's GPTModel with packed attention, and a head that computes only rows with loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from dppo_megatron.config.schema import Config
from dppo_megatron.hf import HFModelConfig, ModelError, padded_vocab_size, read_hf_config
from dppo_megatron.vocab_parallel import batch_invariant_logits

from . import megatron_version
from .batch.packing import PackedSequences
from .experts import group_experts
from .layout import Layout
from .local.attention import PackedAttention, SinkAttention
from .local.delta_net import GatedDeltaNet
from .local.exact import ExactAttention, multiply_exactly
from .local.operators import RMSNorm
from .lora import add_adapters
from .model_config import machine_problems, model_problems, use_transformer_engine
from .precision import fuse_weight_gradients

if TYPE_CHECKING:
    from jaxtyping import Float


class PolicyModel(GPTModel):
    """Extends GPTModel by a last stage that projects only the rows in `packed_seq_params.rows`.

    forward(input_ids [1, T], position_ids [1, T], None, packed_seq_params=PackedSequences) returns
    - before the last stage: hidden states [T, 1, H] ([T / tp, 1, H] with sequence parallelism);
    - on the last stage, with `fused_head`: hidden states [n, H] of the rows, to be multiplied by `head_weight`; their
      gradient must be complete when it arrives, summed over the tensor-parallel group;
    - on the last stage, otherwise: this rank's logits [n, V / tp], in the parameters' dtype or, with `fp32_head`,
      computed in fp32.

    With `batch_invariant_head` a row's logits have the same bits in every batch. With `exact` logit statistics must
    not use compiled code, because an engine computes the same statistics in another process.
    """

    def __init__(
        self,
        *args: Any,
        fused_head: bool = False,
        fp32_head: bool = False,
        batch_invariant_head: bool = False,
        exact: bool = False,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.fused_head = fused_head
        self.fp32_head = fp32_head
        self.batch_invariant_head = batch_invariant_head
        self.exact = exact
        if self.post_process and batch_invariant_head:
            # Keep the module, because Megatron gathers parameters in module hooks and `trace` records the output.
            self.output_layer.forward = self._batch_invariant_logits
        if self.post_process and fp32_head:
            # Fused accumulation needs the weight's gradient buffer, but here the weight is a copy.
            self.output_layer.gradient_accumulation_fusion = False
        if self.post_process and self.config.sequence_parallel:
            # The rows are gathered before the head; the backward pass of the gather is the reduce-scatter.
            self.output_layer.sequence_parallel = False
            self.output_layer.disable_grad_reduce = True

    @property
    def head_weight(self) -> Float[Tensor, "V/tp H"]:
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def _postprocess(self, hidden_states: Tensor, *, packed_seq_params: PackedSequences, **_: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            hidden_states = tensor_parallel.gather_from_sequence_parallel_region(
                hidden_states,
                # With these two settings the gradient is already a sum.
                tensor_parallel_output_grad=not (self.fused_head or self.batch_invariant_head),
                group=self.pg_collection.tp,
            )
        assert packed_seq_params.rows is not None  # the packer always sets them
        rows = hidden_states.index_select(0, packed_seq_params.rows)
        if self.fused_head:
            return rows.squeeze(1)
        weight = self.head_weight
        if self.fp32_head:
            rows, weight = rows.float(), weight.float()
        logits, _ = self.output_layer(rows, weight=weight)
        return logits.squeeze(1)

    def _batch_invariant_logits(self, rows: Tensor, weight: Tensor) -> tuple[Tensor, None]:
        """Replace ColumnParallelLinear.forward; it does not add the weight gradient to Megatron's buffer."""
        return batch_invariant_logits(rows.squeeze(1), weight, self.pg_collection.tp).unsqueeze(1), None


def check_model(config: Config) -> list[str]:
    """Return every reason why this machine cannot train `model.path` in the configured layout; empty = none.

    Each line is `setting = value: why; remedy`. Starts no process and reads only `config.json`.
    """
    try:
        hf = read_hf_config(config.model.path)
    except ModelError as error:
        unreadable = [f"model.path = {error.source}: {problem}" for problem in error.problems]
        return unreadable + machine_problems(config)
    return model_problems(hf, config)


def build_model(hf: HFModelConfig, config: Config, layout: Layout, transformer: TransformerConfig) -> list[PolicyModel]:
    """Build this rank's model chunks (one, or one per virtual stage), randomly initialized, on the device.

    With `model.lora` only the adapters require gradients.
    """
    stages = layout.virtual_pipeline_size
    chunks = []
    for stage in range(stages or 1):
        first = layout.pipeline_rank == 0 and stage == 0
        last = layout.is_last_stage and stage == (stages or 1) - 1
        chunk = _chunk(hf, config, layout, transformer, first, last, None if stages is None else stage)
        chunks.append(chunk.to(layout.device))
    if config.model.lora.r:
        add_adapters(chunks, hf, config)
        group_experts(chunks, config)
    megatron_version.drop_replay_registry()
    for chunk in chunks:
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        for layer in chunk.decoder.layers:
            if isinstance(layer.mlp, MoELayer) and layout.expert_tensor_size != layout.tensor_size:
                for parameter in layer.mlp.experts.parameters():
                    # Megatron marks only expert-parallel experts, and would reduce these over the wrong ranks.
                    parameter.allreduce = False
    return chunks


def _chunk(
    hf: HFModelConfig,
    config: Config,
    layout: Layout,
    transformer: TransformerConfig,
    first: bool,
    last: bool,
    vp_stage: int | None,
) -> PolicyModel:
    engine = use_transformer_engine(config)
    spec = megatron_version.block_spec(transformer, engine, vp_stage)
    if not engine:
        attention = ExactAttention if config.engine.exact else PackedAttention if hf.sinks is None else SinkAttention
        _use_own_modules(spec, attention)
    if hf.delta_net is not None:
        offset = megatron_version.layer_offset(transformer, vp_stage, layout.pipeline_rank)
        _use_delta_net(spec, hf.delta_net.layers[offset:])
    model = PolicyModel(
        config=transformer,
        transformer_layer_spec=spec,
        vocab_size=padded_vocab_size(hf.vocab_size, layout.tensor_size),
        max_sequence_length=hf.max_position_embeddings,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=hf.tied_embeddings,
        # PackedAttention rotates by position id. With TransformerEngine Megatron rotates, in a fused kernel. Latent
        # attention rotates separately.
        position_embedding_type="rope" if engine and hf.mla is None else "none",
        rotary_base=hf.rope_theta,
        rotary_percent=hf.partial_rotary_factor,
        rope_scaling=hf.rope_type == "llama3",
        rope_scaling_factor=hf.rope_scaling.get("factor", 1.0),
        vp_stage=vp_stage,
        fused_head=config.model.logits == "fused",
        fp32_head=config.model.fp32_head,
        batch_invariant_head=config.model.batch_invariant_head,
        exact=config.engine.exact,
    )
    if engine:
        fuse_weight_gradients(model.decoder)
    if hf.sinks is not None:
        _correct_expert_biases(model)
    if config.engine.exact:
        multiply_exactly(model)
    return model


def _correct_expert_biases(model: PolicyModel) -> None:
    """Make experts with biases trainable in the local spec, and treat the output bias like the weights.

    Megatron adds the bias in place, and autograd rejects this for a view. Megatron also reduces the bias gradient over
    tensor-parallel ranks, and counts the bias in the norm only on the first rank. Both are wrong for unsharded experts,
    because the ranks have different tokens or experts.
    """
    for module in model.modules():
        if isinstance(module, SequentialMLP):
            for expert in module.local_experts:
                expert.linear_fc2.register_forward_hook(lambda _, __, out: (out[0].clone(), out[1]))
                bias = expert.linear_fc2.bias
                bias.sequence_parallel = False
                tensor_parallel.set_tensor_model_parallel_attributes(bias, is_parallel=True, dim=0, stride=1)


def _use_delta_net(block: TransformerBlockSubmodules, layers: Sequence[bool]) -> None:
    """Replace attention in the layers of this stage that `layers` marks. Equal layers share a spec object."""
    specs = list(block.layer_specs)
    for index, spec in enumerate(specs):
        if layers[index]:
            modules = dataclasses.replace(spec.submodules, self_attention=ModuleSpec(module=GatedDeltaNet))
            specs[index] = dataclasses.replace(spec, submodules=modules)
    block.layer_specs = specs


def _use_own_modules(block: TransformerBlockSubmodules, core_attention: type[PackedAttention]) -> None:
    """Replace norms and core attention in the local spec."""
    block.layer_norm = RMSNorm
    for layer in block.layer_specs:
        modules, attention = layer.submodules, layer.submodules.self_attention.submodules
        attention.core_attention = core_attention
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            if hasattr(attention, name):
                # Megatron shards these layers by rows and gathers. All heads share the rotated key, but a rank would
                # then have only the gradient from its heads.
                setattr(attention, name, megatron_version.replicated_linear())
        for module, names in (
            (modules, ("input_layernorm", "pre_mlp_layernorm")),
            (attention, ("q_layernorm", "k_layernorm", "kv_layernorm")),
        ):
            for name in names:
                if getattr(module, name, IdentityOp) is not IdentityOp:
                    setattr(module, name, RMSNorm)
