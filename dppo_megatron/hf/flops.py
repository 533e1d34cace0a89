"""Counts the FLOPs in a model's matrix products, two per multiply-add, for the plan and the metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from dppo_megatron.config.model import LoraConfig

from .hf_config import HFModelConfig
from .peft import adapter_shapes
from .weight_map import WeightMap


class Work(NamedTuple):
    """Counts the forward-pass work over all ranks.

    Example: sequences with 3 and 4 tokens have 7 rows and 6 + 10 = 16 pairs.
    """

    rows: int  # tokens that pass through the layers
    pairs: int  # (query, key) pairs in causal attention: L (L + 1) / 2 for a sequence with L tokens
    head_rows: int  # tokens with loss; no other logits are computed


class ModelFlops(NamedTuple):
    """Contains the forward-pass FLOPs per unit of `Work`.

    A token uses `top_k` routed experts and all shared experts.
    """

    row: int  # projections, feed-forward, routers, gated delta net states
    pair: int  # attention scores and the weighted sum of values
    head_row: int
    adapter_row: int = 0  # LoRA; 0 = all weights are trained

    @classmethod
    def from_config(cls, config: HFModelConfig, lora: LoraConfig) -> ModelFlops:
        weights = WeightMap(config).hf_tensors().items()
        widths = config.head_dim + (config.head_dim if config.mla is None else config.mla.v_head_dim)
        matrices = {name: shape for name, shape in weights if ".layers." in name and _is_matrix(name, shape)}
        return cls(
            _matrix_flops(matrices, config) + _state_flops(config),
            2 * len(config.attention_layers) * config.num_heads * widths,
            2 * config.hidden_size * config.vocab_size,
            _matrix_flops(adapter_shapes(config, lora), config) if lora.r else 0,
        )

    def forward(self, work: Work) -> int:
        """Return how many FLOPs a pass without gradients takes."""
        return (self.row + self.adapter_row) * work.rows + self.pair * work.pairs + self.head_row * work.head_rows

    def update(self, work: Work) -> int:
        """Return how many FLOPs a forward and backward pass take: three forward passes, without recompute.

        With LoRA the model's weights need no gradient, so their products count twice. Adapter and attention products
        count three times.
        """
        frozen = self.row * work.rows + self.head_row * work.head_rows if self.adapter_row else 0
        return 3 * self.forward(work) - frozen


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    return not name.endswith("bias") and (len(shape) == 2 or ".experts." in name)


def _state_flops(config: HFModelConfig) -> int:
    """Return the gated delta net FLOPs per row. Token by token, a state is read twice and updated once."""
    if (sizes := config.delta_net) is None:
        return 0
    states = 3 * 2 * sizes.num_value_heads * sizes.key_head_dim * sizes.value_head_dim
    convolution = 2 * sizes.conv_kernel * sum(sizes.widths[name] for name in "qkv")
    return sum(sizes.layers) * (states + convolution)


def _matrix_flops(shapes: Mapping[str, tuple[int, ...]], config: HFModelConfig) -> int:
    moe = config.moe
    experts = sum(math.prod(shape) for name, shape in shapes.items() if ".experts." in name)
    unused = 0 if moe is None else experts * (moe.num_experts - moe.top_k) // moe.num_experts
    return 2 * (sum(map(math.prod, shapes.values())) - unused)
