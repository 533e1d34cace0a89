"""Defines the typed `config.json`, which `parse_config` reads. The weight map and the model builder share it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

# Weight storage, weight initialization and token ids do not change the model's function.
_NOT_OF_THE_MODEL = (
    "initializer_range", "eos_token_ids", "quantization", "source", "raw", "max_position_embeddings", "mtp_layers",
)  # fmt: skip
# Keys in config.json for layers after the model. These layers are neither loaded nor exported.
MTP_NAMES = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """Describes a mixture of experts. `layers[i]` is True if layer i has experts; the other layers are dense."""

    num_experts: int
    top_k: int
    ffn_hidden_size: int  # width of an expert
    layers: tuple[bool, ...]
    norm_topk_prob: bool = True  # selected probabilities are rescaled to sum to 1
    score_function: str = "softmax"  # or "sigmoid"
    shared_ffn_hidden_size: int = 0  # all shared experts together; 0 = none
    shared_gate: bool = False  # a sigmoid gate per token multiplies the shared experts' output
    expert_bias: bool = False  # correction bias added to the scores for selection only
    num_groups: int | None = None  # group-limited routing: groups of experts, and how many may be selected
    topk_groups: int | None = None
    routed_scaling_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class MLAConfig:
    """Contains the sizes of multi-head latent attention."""

    q_lora_rank: int | None  # None = queries are not compressed
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True)
class DeltaNetConfig:
    """Contains the gated delta net sizes. `layers[i]` is True if layer i is a gated delta net, False for attention.

    In such a model attention has an output gate, and norms multiply by 1 + weight.
    """

    num_key_heads: int
    num_value_heads: int  # a multiple of the key heads; the value heads in a group share queries and keys
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    layers: tuple[bool, ...]

    @property
    def widths(self) -> dict[str, int]:
        """Return how many input projection rows each part has: q, k, v, output gate z, beta b, decay a."""
        key, value = self.num_key_heads * self.key_head_dim, self.num_value_heads * self.value_head_dim
        return {"q": key, "k": key, "v": value, "z": value, "b": self.num_value_heads, "a": self.num_value_heads}


@dataclass(frozen=True, slots=True)
class SinksConfig:
    """Describes the gpt-oss layers. `layers[i]` is True if layer i has a sliding window; the others see all keys.

    Every head has a learned sink, an exponent in the softmax denominator. All linear layers in the decoder and the
    router have biases. SwiGLU is (up + 1) gate sigmoid(1.702 gate), clamped at `swiglu_limit`.
    """

    window: int  # number of keys that a query sees, including the key at the query's position
    layers: tuple[bool, ...]
    swiglu_limit: float


@dataclass(frozen=True, slots=True)
class HFModelConfig:
    """Contains the `config.json` fields that decide shapes and arithmetic. `raw` is the file as read."""

    family: str  # key in `families.FAMILIES`
    architecture: str  # class name in transformers
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # size of queries and keys; latent attention: nope + rope
    ffn_hidden_size: int  # dense layer width
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    rope_type: str = "default"  # "default" | "llama3" | "yarn"
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)  # parameters for a non-default rope_type
    partial_rotary_factor: float = 1.0  # rotated share of each head's dimensions, from the first on
    moe: MoEConfig | None = None
    mla: MLAConfig | None = None
    delta_net: DeltaNetConfig | None = None
    sinks: SinksConfig | None = None
    mtp_layers: int = 0  # multi-token prediction layers stored after the model; never loaded or exported
    initializer_range: float = 0.02
    eos_token_ids: tuple[int, ...] = ()
    quantization: Mapping[str, Any] | None = None  # quantization_config, if the weights are quantized
    source: str = "config.json"
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def identity(self) -> dict[str, Any]:
        """Return the fields that must be equal in two configs of the same model, in the types that JSON returns.

        Fields for experts, latent attention, delta net and sinks have names like `moe.top_k`. They exist only in models
        with these parts.
        """
        identity: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in ("moe", "mla", "delta_net", "sinks"):
                identity |= {f"{f.name}.{name}": v for name, v in (asdict(value) if value else {}).items()}
            elif f.name not in _NOT_OF_THE_MODEL:
                identity[f.name] = value
        return json.loads(json.dumps(identity))

    @property
    def rotary_dim(self) -> int:
        """Return how many dimensions per head are rotated; with latent attention, the rotary part."""
        return self.mla.qk_rope_head_dim if self.mla else int(self.head_dim * self.partial_rotary_factor)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Return the global indices of the layers with attention."""
        delta_net = self.delta_net
        return tuple(i for i in range(self.num_layers) if delta_net is None or not delta_net.layers[i])

    def is_moe_layer(self, layer: int) -> bool:
        """Return whether the layer with the global index `layer` has experts."""
        return self.moe is not None and self.moe.layers[layer]
