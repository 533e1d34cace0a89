"""Reads `config.json` from a Hugging Face model directory and reports every problem at once.

It does not use transformers' AutoConfig, which silently fills in missing keys and accepts values of any type.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import AliasChoices

from dppo_megatron.common.files import read_foreign_json
from dppo_megatron.errors import shown

from .errors import ModelError
from .families import FAMILIES, Family
from .hf_config import HFModelConfig
from .raw_config import ROPE_TYPES, RawConfig, RopeSettings, read_fields

# Features that change the arithmetic but no tensor name, with the only supported value and the reason.
_ONLY = {
    "hidden_act": ("silu", "only silu is supported"),
    "use_sliding_window": (False, "sliding-window attention is not supported"),
    "dual_chunk_attention_config": (None, "dual chunk attention is not supported"),
    "attention_bias": (False, "a bias on the attention output is not supported"),
    "mlp_bias": (False, "biases in the feed-forward layers are not supported"),
    "rope_interleave": (True, "only interleaved rotary embeddings are supported"),
}
# HFModelConfig.rope_scaling leaves out these keys.
_ROPE_NAMES = ("rope_theta", "rope_type", "type", "partial_rotary_factor")

Rope = tuple[float, str, dict[str, Any]]  # base, type, settings of a non-default type


def read_hf_config(directory: str | Path) -> HFModelConfig:
    """Read and validate `directory/config.json`.

    Raises `ModelError` naming every problem: missing directory or file, invalid JSON, unsupported
    architecture, missing or ill-typed fields, sizes that do not divide, arithmetic that is not implemented.
    """
    directory = Path(directory)
    path = directory / "config.json"
    if not directory.is_dir():
        problem = "a file; pass its directory" if directory.exists() else "no such directory; pass a local one"
        raise ModelError(str(directory), [f"{problem} (`hf download NAME --local-dir DIR`)"])
    try:
        raw = read_foreign_json(path)
    except FileNotFoundError:
        if (directory / "adapter_config.json").is_file():
            problem = "a PEFT adapter, no model; model.path is its base model, and model.lora.adapter this directory"
        elif any(directory.glob("*.distcp")):
            problem = "a Megatron checkpoint; set model.weights to it, and model.path to its Hugging Face model"
        elif inside := sorted(directory.glob("snapshots/*/config.json")):
            problem = f"the cache of a model of the Hub; pass the directory of a revision, e.g. {inside[-1].parent}"
        else:
            file, place = ("config.json ", directory) if any(directory.glob("*.safetensors")) else ("", "DIR")
            remedy = f"pass a model's directory (`hf download NAME {file}--local-dir {place}`)"
            problem = f"no config.json: not a Hugging Face model directory; {remedy}"
        raise ModelError(str(directory), [problem]) from None
    except ValueError as error:
        raise ModelError(str(path), [str(error)]) from None
    return parse_hf_config(raw, str(path))


def parse_hf_config(raw: Mapping[str, Any], source: str = "config.json") -> HFModelConfig:
    """Return the typed content of a parsed `config.json`. Raises `ModelError` as `read_hf_config` does."""
    family = _family(raw, source)
    problems: list[str] = []
    fields = read_fields(family.raw, raw, problems)
    rope_theta, rope_type, rope_scaling = _rope(fields, family, problems)
    kv_heads = fields.num_key_value_heads or fields.num_attention_heads
    moe, mla = fields.experts(), fields.latent_attention()
    head_dim = fields.head_dim or family.head_dim or fields.hidden_size // fields.num_attention_heads
    if mla is not None:
        head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    config = HFModelConfig(
        family=family.name,
        architecture=family.architecture,
        hidden_size=fields.hidden_size,
        num_layers=fields.num_hidden_layers,
        num_heads=fields.num_attention_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_hidden_size=fields.intermediate_size,
        vocab_size=fields.vocab_size,
        rms_norm_eps=fields.rms_norm_eps,
        rope_theta=rope_theta,
        max_position_embeddings=fields.max_position_embeddings,
        tied_embeddings=fields.tie_word_embeddings,
        qkv_bias=family.qkv_bias or fields.qkv_bias(),
        qk_norm=family.qk_norm or fields.qk_norm(),
        rope_type=rope_type,
        rope_scaling=rope_scaling,
        partial_rotary_factor=_partial_rotary(fields, family, problems),
        moe=moe,
        mla=mla,
        delta_net=fields.delta_net(),
        sinks=fields.sinks(),
        mtp_layers=fields.mtp_layers(),
        initializer_range=fields.initializer_range,
        eos_token_ids=tuple(fields.eos_token_id),
        quantization=fields.quantization_config,
        source=source,
        raw=dict(raw),
    )
    problems += _size_problems(fields, family, config) + fields.problems(raw)
    problems += [
        f"{name} = {shown(raw[name])}: {reason}"
        for name, (only, reason) in _ONLY.items()
        if raw.get(name) not in (None, only) and name not in family.raw.model_fields  # a family may read it itself
    ]
    if problems:
        raise ModelError(source, list(dict.fromkeys(problems)))
    return config


def keys_read(family: Family) -> frozenset[str]:
    """Return the config.json keys that this module reads for a family."""
    aliases = (field.validation_alias for field in family.raw.model_fields.values())
    choices = (str(choice) for alias in aliases if isinstance(alias, AliasChoices) for choice in alias.choices)
    return frozenset((*family.raw.model_fields, *choices, *_ONLY))


def family_of(raw: Mapping[str, Any]) -> Family | None:
    """Return the family of a config.json, or None if it does not name exactly one supported architecture."""
    return next((family for family in FAMILIES.values() if raw.get("architectures") == [family.architecture]), None)


def _family(raw: Mapping[str, Any], source: str) -> Family:
    if (family := family_of(raw)) is not None:
        return family
    architectures = raw.get("architectures") or []
    problem = f"architectures = {shown(architectures)}: not supported" if architectures else "architectures: missing"
    if any(architectures == [family.wrapper] for family in FAMILIES.values()):
        remedy = "`dppo-megatron convert hf-to-hf SRC DST` writes its supported text model"
    else:
        remedy = f"supported: {', '.join(family.architecture for family in FAMILIES.values())}"
    raise ModelError(source, [f"{problem}; {remedy}"])


def _size_problems(fields: RawConfig, family: Family, config: HFModelConfig) -> list[str]:
    """List sizes that contradict one another."""
    hidden, heads, kv_heads = config.hidden_size, config.num_heads, config.num_kv_heads
    out = []
    if config.moe is not None and config.moe.top_k > config.moe.num_experts:
        out.append(f"num_experts_per_tok = {config.moe.top_k}: more than the {config.moe.num_experts} experts")
    if config.mla is None and not (fields.head_dim or family.head_dim) and hidden % heads:
        out.append(f"head_dim: missing, and num_attention_heads = {heads} does not divide hidden_size = {hidden}")
    if config.rotary_dim % 2:
        out.append(f"partial_rotary_factor = {config.partial_rotary_factor}: rotates {config.rotary_dim} of "
                   f"{config.head_dim} dimensions, which cannot be paired")  # fmt: skip
    if heads % kv_heads:
        out.append(f"num_attention_heads = {heads}: not a multiple of num_key_value_heads = {kv_heads}")
    return out


def _rope(fields: RawConfig, family: Family, problems: list[str]) -> Rope:
    """Return base, type and scaling from transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`)."""
    spellings = {"rope_scaling": fields.rope_scaling, "rope_parameters": fields.rope_parameters}
    ropes = [_rope_settings(name, raw, fields, family, problems) for name, raw in spellings.items() if raw]
    if len(ropes) == 2 and ropes[0] != ropes[1]:
        problems.append("rope_scaling and rope_parameters: they differ; remove the wrong one")
    return ropes[0] if ropes else (fields.rope_theta, "default", {})


def _partial_rotary(fields: RawConfig, family: Family, problems: list[str]) -> float:
    """Return the rotated share of each head; transformers 4 has it at the top level, 5 in `rope_parameters`."""
    candidates = {"partial_rotary_factor": fields.partial_rotary_factor} | {
        f"{name}.partial_rotary_factor": (settings or {}).get("partial_rotary_factor")
        for name, settings in (("rope_scaling", fields.rope_scaling), ("rope_parameters", fields.rope_parameters))
    }
    factors = {name: value for name, value in candidates.items() if isinstance(value, int | float)}
    if len(set(factors.values())) > 1:
        problems.append(f"{' and '.join(factors)}: they differ; remove the wrong one")
    name, factor = next(iter(factors.items()), ("", family.partial_rotary or 1.0))
    if factor != 1 and family.partial_rotary is None:
        problems.append(f"{name} = {factor}: not supported")
    return float(factor)


def _rope_settings(name: str, raw: Mapping[str, Any], fields: RawConfig, family: Family, problems: list[str]) -> Rope:
    """Read either spelling. `rope_theta` may be inside it or at the top level."""
    if nested := [key for key, value in raw.items() if isinstance(value, Mapping)]:
        problems.append(f"{name}: settings for kinds of layers ({', '.join(nested)}) are not supported")
    rope_type = raw.get("rope_type") or raw.get("type") or "default"
    supported = rope_type in family.rope_types
    if not supported:
        problems.append(f"rope_type = {shown(rope_type)}: {family.name} supports {', '.join(family.rope_types)}")
    settings = read_fields(ROPE_TYPES[rope_type] if supported else RopeSettings, raw, problems, f"{name}.")
    theta = settings.rope_theta or fields.rope_theta
    if rope_type == "default" or not supported:
        return theta, "default", {}
    return theta, rope_type, {k: v for k, v in raw.items() if v is not None and k not in _ROPE_NAMES}
