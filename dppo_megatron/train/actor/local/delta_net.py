"""Implements gated delta net layers for packed sequences, which Megatron's layers reject on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor, nn

from dppo_megatron.train.actor.batch.chunks import ChunkPlan

from .delta_rule import causal_convolution, gated_delta_rule
from .operators import rms_norm

if TYPE_CHECKING:
    from jaxtyping import Float

    from dppo_megatron.train.actor.batch.packing import PackedSequences


class CausalConvolution(nn.Module):
    """Applies `causal_convolution` with a weight [c, 1, k]; a module, because hooks wait for gathered parameters."""

    def __init__(self, channels: int, kernel: int, place: dict[str, Any]):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, 1, kernel, **place))

    def forward(self, x: Float[Tensor, "T c"], chunks: ChunkPlan) -> Float[Tensor, "T c"]:
        return causal_convolution(x, self.weight, chunks.columns)


class GatedNorm(nn.Module):
    """Normalizes the outputs of each head and multiplies them by weight and silu(gate).

    All tensor-parallel ranks have the weight, but different heads, so the gradient is summed over the ranks.
    """

    def __init__(self, size: int, eps: float, group: dist.ProcessGroup, place: dict[str, Any]):
        super().__init__()
        self.eps, self.group = eps, group
        self.weight = nn.Parameter(torch.ones(size, **place))

    def forward(self, x: Float[Tensor, "T h d"], gate: Float[Tensor, "T h d"]) -> Float[Tensor, "T h d"]:
        weight = copy_to_tensor_model_parallel_region(self.weight, group=self.group)
        return (rms_norm(x, weight, self.eps) * F.silu(gate.float())).to(x.dtype)


class GatedDeltaNet(MegatronModule):
    """Mixes the rows of each packed sequence by the gated delta rule: layer specs' `self_attention`.

    A tensor-parallel rank has groups of heads: a head of queries and keys with the value heads that share it. The input
    projection and the convolution are interleaved by group (`hf.operations.ByGroup`), so that each rank's part is
    contiguous. Collectives: Megatron's in column- and row-parallel layers, and an all-reduce of the norm gradient.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, *, pg_collection: Any, **_: Any):
        super().__init__(config=config)
        self.layer_number = layer_number
        self.tp_group = pg_collection.tp
        ranks = self.tp_group.size()
        self.groups = config.linear_num_key_heads // ranks
        self.shared = config.linear_num_value_heads // config.linear_num_key_heads
        key, value = config.linear_key_head_dim, config.linear_value_head_dim
        self.value_dim = value
        self.sections = (key, key, self.shared * value, self.shared * value, self.shared, self.shared)
        heads, rows = self.groups * self.shared, ranks * self.groups * sum(self.sections)
        linear: dict[str, Any] = {"config": config, "init_method": config.init_method, "bias": False}
        linear |= {"is_expert": False, "tp_group": self.tp_group}
        hidden, width = config.hidden_size, ranks * heads * value
        self.in_proj = ColumnParallelLinear(hidden, rows, gather_output=False, skip_bias_add=False, **linear)
        self.out_proj = RowParallelLinear(width, hidden, input_is_parallel=True, skip_bias_add=True, **linear)
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        place: dict[str, Any] = {"device": device, "dtype": config.params_dtype}
        self.conv1d = CausalConvolution(self.groups * sum(self.sections[:3]), config.linear_conv_kernel_dim, place)
        self.dt_bias = nn.Parameter(torch.ones(heads, **place))
        self.A_log = nn.Parameter(torch.zeros(heads, **place))
        for parameter in (self.conv1d.weight, self.dt_bias, self.A_log):
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        self.out_norm = GatedNorm(value, config.layernorm_epsilon, self.tp_group, place)

    def forward(
        self, hidden_states: Float[Tensor, "S 1 H"], *_args: Any, packed_seq_params: PackedSequences, **_options: Any
    ) -> tuple[Float[Tensor, "S 1 H"], None]:
        """Return (output, no bias). S: T rows, or a sequence-parallel share of them."""
        chunks = packed_seq_params.chunks
        assert chunks is not None  # the packer plans them for models with such layers
        mixed, _ = self.in_proj(hidden_states)
        rows, (key, _, values), gate_sizes = mixed.shape[0], self.sections[:3], self.sections[3:]
        mixed = mixed.view(rows, self.groups, -1)
        qkv, z, b, a = mixed.split((2 * key + values, *gate_sizes), dim=-1)
        qkv = F.silu(self.conv1d(qkv.reshape(rows, -1), chunks))
        q, k, v = qkv.view(rows, self.groups, -1).split((key, key, values), dim=-1)
        v, z = (x.reshape(rows, -1, self.value_dim) for x in (v, z))
        a, b = (x.reshape(rows, -1) for x in (a, b))
        decay = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
        out = gated_delta_rule(q, k, v, decay, b.sigmoid(), chunks).to(mixed.dtype)
        out = self.out_norm(out, z)
        projected, _ = self.out_proj(out.view(rows, 1, -1))
        return projected, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Describe the parameters for a checkpoint that any tensor-parallel size can load."""
        parameters = {"dt_bias": self.dt_bias, "A_log": self.A_log, "conv1d.weight": self.conv1d.weight}
        out = make_sharded_tensors_for_checkpoint(
            parameters,
            prefix,
            dict.fromkeys(parameters, 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )
        for name in ("in_proj", "out_proj", "out_norm"):
            module = getattr(self, name)
            out |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group
            )
        return out
