"""Reports a model directory's supported and missing features from config.json, with or without weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dppo_megatron.common.files import read_foreign_json
from dppo_megatron.errors import bounded, shown
from dppo_megatron.hf import FAMILIES, Family, HFModelConfig, ModelError, WeightMap, parse_hf_config, read_hf_config
from dppo_megatron.hf.parse_config import family_of, keys_read
from dppo_megatron.hf.text_model import text_config
from dppo_megatron.hf.weight_source import header_problems, open_weights

from .layout import TargetLayout
from .verify import trainer_config

# Keys that do not change the model's function in training here: dropout, auxiliary losses, caches, provenance.
_NEUTRAL = frozenset((
    "_name_or_path", "architectures", "attention_dropout", "auto_map", "aux_loss_alpha", "chunk_size_feed_forward",
    "embd_pdrop", "ep_size", "hidden_dropout", "id2label", "is_encoder_decoder", "label2id", "max_window_layers",
    "model_type", "output_attentions", "output_hidden_states", "output_router_logits", "pretraining_tp", "problem_type",
    "qk_head_dim", "resid_pdrop", "return_dict", "router_aux_loss_coef", "router_jitter_noise", "seq_aux",
    "text_config", "transformers_version", "use_cache",
))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Support:
    """Lists facts about a supported model, problems that prevent its use, and keys that `family` does not read."""

    family: str  # for an unknown architecture the nearest family
    supported: tuple[str, ...]
    missing: tuple[str, ...]
    unread: tuple[str, ...]

    def __str__(self) -> str:
        unread = f"keys of config.json that {self.family} does not read"
        parts = {"supported": self.supported, "missing": self.missing, unread: self.unread}
        lines = [
            f"{title}:{''.join(f'{chr(10)}  - {bounded(entry, 600)}' for entry in entries)}"
            for title, entries in parts.items()
            if entries
        ]
        return "\n".join(lines)


def check(directory: Path) -> Support:
    """Check a directory that has at least a config.json. Reads only weight headers, and builds no model.

    An unknown architecture is compared with the nearest family. Raises `ModelError` without a readable config.json.
    """
    try:
        config = read_hf_config(directory)
    except ModelError as error:
        try:
            raw = read_foreign_json(directory / "config.json")
        except (OSError, ValueError):
            raise error from None
        text = text_config(raw)
        if text is None:
            return _unsupported(raw, error.problems)
        try:
            config = parse_hf_config(text)
        except ModelError as of_text:
            return _unsupported(text, (*error.problems, *of_text.problems))
        return Support(
            config.family, tuple(_facts(directory, config)), error.problems, _unread(text, FAMILIES[config.family])
        )
    from dppo_megatron.train.actor import check_model  # imports Megatron-core

    missing = _weight_problems(directory, config) + check_model(trainer_config(directory))
    facts, unread = _facts(directory, config), _unread(config.raw, FAMILIES[config.family])
    return Support(config.family, tuple(facts), tuple(missing), unread)


def _unsupported(raw: Mapping[str, Any], problems: tuple[str, ...]) -> Support:
    if (family := family_of(raw)) is not None:
        return Support(family.name, (), problems, _unread(raw, family))
    modality_problems = [
        f"{name}: only text is supported" for name in raw if name.endswith(("vision_config", "audio_config"))
    ]
    text = raw.get("text_config")
    inner = text if isinstance(text, dict) else raw
    candidates = {family.name: (_problems(inner, family), _unread(inner, family)) for family in FAMILIES.values()}
    nearest, (mismatches, unread) = min(candidates.items(), key=lambda item: len(item[1][0]) + len(item[1][1]))
    return Support(
        nearest, (), (*problems, *modality_problems, *(f"as {nearest}: {line}" for line in mismatches)), unread
    )


def _problems(raw: Mapping[str, Any], family: Family) -> list[str]:
    try:
        parse_hf_config({**raw, "architectures": [family.architecture]})
    except ModelError as error:
        return list(error.problems)
    return []


def _unread(raw: Mapping[str, Any], family: Family) -> tuple[str, ...]:
    known_keys = keys_read(family) | _NEUTRAL
    kinds = raw.get("layer_types")
    if isinstance(kinds, list) and set(map(str, kinds)) <= {"full_attention"}:
        known_keys |= {"layer_types"}
    if raw.get("use_sliding_window") is False:
        known_keys |= {"sliding_window"}
    return tuple(
        f"{name} = {shown(value)}" for name, value in raw.items() if name not in known_keys and value is not None
    )


def _facts(directory: Path, config: HFModelConfig) -> list[str]:
    parameters = sum(map(math.prod, WeightMap(config).hf_tensors().values()))
    moe, mla = config.moe, config.mla
    out = [f"{config.architecture}: {parameters:,} parameters, {config.num_layers} layers of {config.hidden_size}"]
    kind = f"{config.num_kv_heads} of keys and values" if mla is None else f"latent space of {mla.kv_lora_rank}"
    out.append(f"attention: {config.num_heads} heads of {config.head_dim}, {config.rotary_dim} rotated; {kind}")
    if moe is not None:
        out.append(f"experts: {moe.num_experts} in {sum(moe.layers)} layers, {moe.top_k} for each token")
        out.append(f"--expert: {_sizes(config, [TargetLayout(expert=size) for size in range(1, moe.num_experts + 1)])}")
    layouts = [TargetLayout(size, expert_tensor=1) for size in range(1, config.num_heads + 1)]
    out.append(f"--tensor: {_sizes(config, layouts)}")
    if config.mtp_layers:
        out.append(f"left out: {config.mtp_layers} multi-token prediction layers")
    stored = "compared by name and shape" if _has_weights(directory) else "none here; only config.json was checked"
    return [*out, f"weights: {stored}"]


def _sizes(config: HFModelConfig, layouts: list[TargetLayout]) -> str:
    return ", ".join(str(max(to.tensor, to.expert)) for to in layouts if not to.problems(config))


def _has_weights(directory: Path) -> bool:
    return any(directory.glob("*.safetensors"))


def _weight_problems(directory: Path, config: HFModelConfig) -> list[str]:
    if not _has_weights(directory):
        return []
    try:
        return header_problems(WeightMap(config), open_weights(directory, config))
    except ModelError as error:
        return list(error.problems)
