"""`config.json` of a Hugging Face model directory as a small typed view; every problem reported at once.

What a family needs beyond the common fields (attention biases, experts, latent attention) is read here too,
so that the weight map and the model builder see the same facts. Defaults for absent keys are those of
transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .errors import ModelError

ARCHITECTURES: Mapping[str, str] = {
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "LlamaForCausalLM": "llama",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}
_ROPE_TYPES = {"llama": ("default", "llama3"), "deepseek_v3": ("default", "yarn")}  # others: default only
_ROPE_NEEDS = {
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
_ROPE_MAY_HAVE = (
    "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor",
)  # fmt: skip
# DeepSeek-V3's keys that readers fill in differently where they are absent. For the first, null is an answer too.
_DEEPSEEK_NULLABLE = ("q_lora_rank", "n_shared_experts", "n_group", "topk_group")
_DEEPSEEK_STATED = ("first_k_dense_replace", "routed_scaling_factor")

# How the weights are stored or start, and what is asked of the tokenizer: no part of the function they compute.
_NOT_OF_THE_MODEL = (
    "initializer_range", "dtype", "bos_token_id", "eos_token_ids", "pad_token_id", "quantization", "source", "raw",
    "max_position_embeddings", "mtp_layers",
)  # fmt: skip
# Layers behind the model that no rule reads: copies of a config.json name 0 of them.
MTP_NAMES = ("num_nextn_predict_layers", "num_mtp_layers")


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """Mixture of experts. `layers[i]` is True where layer i has experts; the others are dense."""

    num_experts: int
    top_k: int
    ffn_hidden_size: int  # of one expert
    layers: tuple[bool, ...]
    norm_topk_prob: bool  # selected probabilities rescaled to sum to 1
    score_function: str  # "softmax" | "sigmoid"
    shared_ffn_hidden_size: int = 0  # all shared experts together; 0 = none
    expert_bias: bool = False  # correction bias added to the scores for selection only
    num_groups: int | None = None  # group-limited routing: groups of experts, and how many may be selected
    topk_groups: int | None = None
    routed_scaling_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class MLAConfig:
    """Multi-head latent attention."""

    q_lora_rank: int | None  # None = queries are not compressed
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True)
class HFModelConfig:
    """The fields of `config.json` that decide shapes and arithmetic. `raw` is the file as read."""

    family: str  # key of dppo_megatron.hf.families
    architecture: str  # class name in transformers
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys; with latent attention nope + rope
    ffn_hidden_size: int  # of a dense layer
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    rope_type: str = "default"  # "default" | "llama3" | "yarn"
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)  # parameters of a non-default rope_type
    moe: MoEConfig | None = None
    mla: MLAConfig | None = None
    mtp_layers: int = 0  # multi-token prediction layers stored behind the model; never loaded nor exported
    initializer_range: float = 0.02
    dtype: str | None = None  # "float32" | "bfloat16" | ...: what the file says the weights are
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    quantization: Mapping[str, Any] | None = None  # quantization_config of a quantised checkpoint
    source: str = "config.json"
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def identity(self) -> dict[str, Any]:
        """What must be equal for two configs to describe the same model, in the types that JSON gives back.

        Fields of experts and latent attention are named `moe.top_k`; models without have none of them.
        """
        found: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in ("moe", "mla"):
                found |= {f"{f.name}.{name}": v for name, v in (asdict(value) if value else {}).items()}
            elif f.name not in _NOT_OF_THE_MODEL:
                found[f.name] = value
        return json.loads(json.dumps(found))

    def is_moe_layer(self, layer: int) -> bool:
        """True where the global layer index `layer` holds experts."""
        return self.moe is not None and self.moe.layers[layer]


def read_hf_config(directory: str | Path) -> HFModelConfig:
    """Reads and validates `directory/config.json`.

    Raises `ModelError` naming every problem: missing directory or file, invalid JSON, unsupported
    architecture, missing or ill-typed fields, sizes that do not divide, arithmetic that is not implemented.
    """
    directory = Path(directory)
    path = directory / "config.json"
    if not directory.is_dir():
        raise ModelError(str(directory), ["no such directory; pass a local Hugging Face model directory"])
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(str(directory), ["no config.json: not a Hugging Face model directory"]) from None
    except json.JSONDecodeError as error:
        raise ModelError(str(path), [f"not valid JSON: {error}"]) from None
    return parse_hf_config(raw, str(path))


def parse_hf_config(raw: Mapping[str, Any], source: str = "config.json") -> HFModelConfig:
    """The typed view of an already parsed `config.json`. Raises `ModelError` as `read_hf_config` does."""
    if not isinstance(raw, Mapping):
        raise ModelError(source, [f"the top level must be an object, found {type(raw).__name__}"])
    architecture = _architecture(raw, source)
    family = ARCHITECTURES[architecture]
    fields = _Fields(raw)

    hidden = fields.size("hidden_size")
    heads = fields.size("num_attention_heads")
    kv_heads = fields.size("num_key_value_heads", default=heads)
    head_dim = fields.size("head_dim", default=128 if family == "qwen3" else hidden // heads)
    num_layers = fields.size("num_hidden_layers")
    rope_theta, rope_type, rope_scaling = _rope(fields, family)
    moe = _moe(fields, family, num_layers)
    if moe is not None and moe.top_k > moe.num_experts:
        fields.problem(f"num_experts_per_tok = {moe.top_k}: more than the {moe.num_experts} experts")
    mla = _mla(fields) if family == "deepseek_v3" else None
    if mla is not None:
        head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    elif not fields.raw.get("head_dim") and family != "qwen3" and hidden % heads:
        fields.problem(f"head_dim: missing, and num_attention_heads = {heads} does not divide hidden_size = {hidden}")
    if heads % kv_heads:
        fields.problem(f"num_attention_heads = {heads}: not a multiple of num_key_value_heads = {kv_heads}")
    eos = fields.value("eos_token_id", (int, list), None)
    config = HFModelConfig(
        family=family,
        architecture=architecture,
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_hidden_size=fields.size("intermediate_size"),
        vocab_size=fields.size("vocab_size"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        max_position_embeddings=fields.size("max_position_embeddings"),
        tied_embeddings=fields.value("tie_word_embeddings", bool, False),
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        rope_type=rope_type,
        rope_scaling=rope_scaling,
        moe=moe,
        mla=mla,
        mtp_layers=fields.value(_spelling(fields, *MTP_NAMES), int, 0) if mla else 0,
        initializer_range=fields.number("initializer_range", 0.02),
        dtype=fields.value(_spelling(fields, "dtype", "torch_dtype"), str, None),
        bos_token_id=fields.value("bos_token_id", int, None),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        pad_token_id=fields.value("pad_token_id", int, None),
        quantization=fields.value("quantization_config", Mapping, None),
        source=source,
        raw=dict(raw),
    )
    _refuse_unimplemented(fields)
    if fields.problems:
        raise ModelError(source, fields.problems)
    return config


class _Fields:
    """Reads typed fields and collects what is wrong; an unreadable size becomes 1 so that reading goes on."""

    def __init__(self, raw: Mapping[str, Any], problems: list[str] | None = None, prefix: str = ""):
        self.raw = raw
        self.problems: list[str] = [] if problems is None else problems
        self._prefix = prefix  # of the names of nested fields

    def problem(self, text: str) -> None:
        text = self._prefix + text
        if text not in self.problems:
            self.problems.append(text)

    def value(self, name: str, kind: Any, default: Any) -> Any:
        value = self.raw.get(name)
        if value is None:
            return default
        wrong_bool = isinstance(value, bool) and kind is not bool  # bool is an int to Python
        if not isinstance(value, kind) or wrong_bool:
            names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            self.problem(f"{name} = {value!r}: must be {names}")
            return default
        return value

    def number(self, name: str, default: float) -> float:
        return float(self.value(name, (int, float), default))

    def size(self, name: str, default: int | None = None) -> int:
        return self._above_zero(name, int, "at least 1", default)

    def positive(self, name: str, default: float | None = None) -> float:
        return float(self._above_zero(name, (int, float), "above 0", default))

    def _above_zero(self, name: str, kind: Any, wanted: str, default: Any) -> Any:
        value = self.value(name, kind, default)
        if value is None:
            if self.raw.get(name) is None:
                self.problem(f"{name}: missing")
            return 1
        if not value > 0:
            self.problem(f"{name} = {value}: must be {wanted}")
            return 1
        return value


def _spelling(fields: _Fields, *names: str) -> str:
    """The spelling of a field that the file uses; the first one when it uses none."""
    return next((name for name in names if fields.raw.get(name) is not None), names[0])


def _architecture(raw: Mapping[str, Any], source: str) -> str:
    named = raw.get("architectures") or []
    if isinstance(named, list) and len(named) == 1 and named[0] in ARCHITECTURES:
        return named[0]
    supported = ", ".join(ARCHITECTURES)
    what = f"architectures = {named!r}: not supported" if named else "architectures: missing"
    raise ModelError(source, [f"{what}; supported: {supported}"])


def _rope(fields: _Fields, family: str) -> tuple[float, str, dict[str, Any]]:
    """Base, type and scaling from transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`)."""
    spelled = {name: fields.value(name, Mapping, None) for name in ("rope_scaling", "rope_parameters")}
    found = [_rope_settings(fields, name, value, family) for name, value in spelled.items() if value]
    if len(found) == 2 and found[0] != found[1]:
        fields.problem("rope_scaling and rope_parameters: they say different things; remove the one that is not meant")
    return found[0] if found else _rope_settings(fields, "rope_scaling", {}, family)


def _rope_settings(
    fields: _Fields, name: str, raw: Mapping[str, Any], family: str
) -> tuple[float, str, dict[str, Any]]:
    """Of one of the two spellings; `rope_theta` may stand beside either."""
    own = _Fields(raw, fields.problems, f"{name}.")
    theta = own.positive("rope_theta", fields.positive("rope_theta", 10000.0))
    if nested := [key for key, value in raw.items() if isinstance(value, Mapping)]:
        fields.problem(f"{name}: settings for kinds of layers ({', '.join(nested)}) are not supported")
    if (partial := own.number("partial_rotary_factor", 1.0)) != 1.0:
        own.problem(f"partial_rotary_factor = {partial}: not supported")
    rope_type = raw.get("rope_type") or raw.get("type") or "default"
    allowed = _ROPE_TYPES.get(family, ("default",))
    if rope_type not in allowed:
        fields.problem(f"rope_type = {rope_type!r}: {family} supports {', '.join(allowed)}")
    if rope_type == "default" or rope_type not in allowed:
        return theta, "default", {}
    for key in _ROPE_NEEDS[rope_type]:
        own.positive(key)
    for key in _ROPE_MAY_HAVE:
        own.number(key, 0.0)
    named_elsewhere = ("rope_theta", "rope_type", "type")
    return theta, rope_type, {k: v for k, v in raw.items() if v is not None and k not in named_elsewhere}


def _moe(fields: _Fields, family: str, num_layers: int) -> MoEConfig | None:
    if family == "qwen3_moe":
        step = fields.size("decoder_sparse_step", 1)
        dense = fields.value("mlp_only_layers", list, [])
        return MoEConfig(
            num_experts=fields.size(_spelling(fields, "num_experts", "num_local_experts")),
            top_k=fields.size("num_experts_per_tok"),
            ffn_hidden_size=fields.size("moe_intermediate_size"),
            layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
            norm_topk_prob=fields.value("norm_topk_prob", bool, False),
            score_function="softmax",
        )
    if family == "deepseek_v3":
        ffn = fields.size("moe_intermediate_size")
        first = fields.value("first_k_dense_replace", int, 0)
        for name, wanted in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
            if fields.raw.get(name, wanted) != wanted:
                fields.problem(f"{name} = {fields.raw[name]!r}: only {wanted!r} is supported")
        for name in _DEEPSEEK_STATED:
            if fields.raw.get(name) is None:
                fields.problem(f"{name}: missing")
        for name in _DEEPSEEK_NULLABLE:
            if name not in fields.raw:
                fields.problem(f"{name}: missing; write null where the model has none")
        groups, topk_groups = (fields.value(name, int, None) for name in ("n_group", "topk_group"))
        if (groups or 1) > 1 and not topk_groups:
            fields.problem(f"topk_group = {topk_groups}: n_group = {groups} needs it")
        return MoEConfig(
            num_experts=fields.size(_spelling(fields, "n_routed_experts", "num_local_experts")),
            top_k=fields.size("num_experts_per_tok"),
            ffn_hidden_size=ffn,
            layers=tuple(i >= first for i in range(num_layers)),
            norm_topk_prob=fields.value("norm_topk_prob", bool, True),
            score_function="sigmoid",
            shared_ffn_hidden_size=ffn * (fields.value("n_shared_experts", int, None) or 0),
            expert_bias=True,
            num_groups=groups,
            topk_groups=topk_groups,
            routed_scaling_factor=fields.number("routed_scaling_factor", 1.0),
        )
    return None


def _mla(fields: _Fields) -> MLAConfig:
    return MLAConfig(
        q_lora_rank=fields.value("q_lora_rank", int, None),
        kv_lora_rank=fields.size("kv_lora_rank"),
        qk_nope_head_dim=fields.size("qk_nope_head_dim"),
        qk_rope_head_dim=fields.size("qk_rope_head_dim"),
        v_head_dim=fields.size("v_head_dim"),
    )


def _refuse_unimplemented(fields: _Fields) -> None:
    """Features that would change the arithmetic without changing any tensor's name."""
    refused = {
        "hidden_act": ("silu", "only silu is supported"),
        "use_sliding_window": (False, "sliding-window attention is not supported"),
        "dual_chunk_attention_config": (None, "dual chunk attention is not supported"),
        "attention_bias": (False, "a bias on the attention output is not supported"),
        "mlp_bias": (False, "biases in the feed-forward layers are not supported"),
        "rope_interleave": (True, "only interleaved rotary embeddings are supported"),
    }
    for name, (wanted, why) in refused.items():
        value = fields.raw.get(name)
        if value is not None and value != wanted:
            fields.problem(f"{name} = {value!r}: {why}")
