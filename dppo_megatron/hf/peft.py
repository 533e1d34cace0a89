"""Reads and writes adapters in PEFT's format: a directory with adapter_model.safetensors and adapter_config.json.

https://huggingface.co/docs/peft/developer_guides/checkpoint describes it. An expert's layer has the name from the
model's files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dppo_megatron.common.files import read_foreign_json, write_atomic
from dppo_megatron.common.ranks import Ranks
from dppo_megatron.config.model import LoraConfig

from .errors import ModelError
from .export import export_adapters, write_parts
from .hf_config import HFModelConfig
from .lora import PEFT_PREFIX, adapter_entry, adapters_of, is_target
from .megatron_model import ParallelRanks, named_weights
from .safetensors_file import TensorInfo
from .safetensors_reader import read_header
from .safetensors_writer import Part
from .staged import write_staged
from .turns import Turns
from .weight_map import WeightMap
from .weight_source import all_finite, shape_problems

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"

# PEFT 0.21 computes W x + (alpha / r) B A x if every key in adapter_config.json is in _OTHERS, or has a value in
# _VALUES, or is null, false or []. Other values of init_lora_weights change W, and so does an empty kasa_config. The
# last five keys in _OTHERS are compared with model.lora and the tensors.
_OTHERS = (
    "base_model_name_or_path", "revision", "auto_mapping", "peft_version", "inference_mode", "lora_dropout",
    "eva_config", "loftq_config", "corda_config", "lora_ga_config", "qalora_group_size", "megatron_core",
    "ensure_weight_tying", "r", "lora_alpha", "target_modules", "exclude_modules", "layers_to_transform",
)  # fmt: skip
_VALUES: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "task_type": ("CAUSAL_LM",), "bias": ("none",), "layers_pattern": ("layers", ["layers"]),
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva", "mica"), "rank_pattern": ({},), "alpha_pattern": ({},),
}  # fmt: skip


def adapter_shapes(config: HFModelConfig, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every adapter tensor, by PEFT name."""
    entries = (adapter_entry(entry, lora.targets, lora.r) for entry in WeightMap(config).entries())
    return {t.name: t.shape for entry in entries if entry for part in (entry.a, entry.b) for t in part.hf}


def save_peft(
    model_chunks: Sequence[nn.Module],
    directory: str | Path,
    config: HFModelConfig,
    lora: LoraConfig,
    base: str | Path,
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    folded: bool = False,
    observe: Callable[[str, Tensor], None] | None = None,
) -> None:
    """Write the adapters of `model_chunks` to a directory that PEFT and engines load. Collective over all ranks.

    `base` is the adapters' base model. With `folded` every B is stored as (alpha / r) B and alpha as r, so an engine
    that multiplies by alpha / r uses the stored values. Everything else is as in `save_hf`.
    """
    directory, everyone = Path(directory), Ranks()
    turns = Turns(everyone, f"writes to {directory}")
    stored = dtype or next(weight.dtype for _, weight in named_weights(model_chunks))
    expected = {name: TensorInfo(stored, shape) for name, shape in adapter_shapes(config, lora).items()}

    def write(staging: Path) -> list[Part]:
        # Adapters are small, so the source ranks gather all of them first and no rank waits for a disk.
        exported = dict(export_adapters(model_chunks, config, dtype, before_gather=turns, folded=folded))
        return write_parts(staging, exported.items(), everyone, observe=observe)

    def complete(staging: Path, parts: list[Part]) -> None:
        _join(staging, parts)
        written = lora.model_copy(update={"alpha": float(lora.r)}) if folded else lora
        write_atomic(staging / ADAPTER_CONFIG, json.dumps(_config(written, base), indent=2, sort_keys=True) + "\n")

    write_staged(directory, expected, everyone, write=write, complete=complete, overwrite=overwrite)


def load_peft(
    model_chunks: Sequence[nn.Module], directory: str | Path, config: HFModelConfig, lora: LoraConfig
) -> None:
    """Fill the adapters of `model_chunks` from a directory in PEFT's format. No collectives.

    Raises `ModelError` before any adapter is filled, listing every setting and tensor that differs from `lora`.
    """
    file = Path(directory) / ADAPTER_WEIGHTS
    if problems := adapter_problems(directory, config, lora):
        raise ModelError(str(directory), problems)
    with safe_open(file, framework="pt") as opened:
        entries = (entry for adapter in adapters_of(model_chunks) for entry in (adapter.entry.a, adapter.entry.b))
        names = {tensor.name for entry in entries for tensor in entry.hf}
        fill_adapters(model_chunks, {name: opened.get_tensor(name) for name in names}, config)


def fill_adapters(model_chunks: Sequence[nn.Module], tensors: Mapping[str, Tensor], config: HFModelConfig) -> None:
    """Fill adapters from `tensors`, by PEFT name. Raises `ModelError` for absent, misshaped or non-finite tensors."""
    ranks, weight_map = ParallelRanks.current(), WeightMap(config)
    not_finite = [name for name, tensor in tensors.items() if not all_finite(tensor)]
    if not_finite:
        raise ModelError(config.source, [f"{name}: contains values that are not finite" for name in not_finite])
    with torch.no_grad():
        for adapter in adapters_of(model_chunks):
            group = ranks.expert_tensor if adapter.entry.a.is_expert else ranks.tensor
            for entry, parameter in ((adapter.entry.a, adapter.A), (adapter.entry.b, adapter.B)):
                parameter.copy_(weight_map.to_megatron(entry, tensors, group.rank, group.size))


def adapter_problems(directory: str | Path, config: HFModelConfig, lora: LoraConfig) -> list[str]:
    """Return each reason why the adapter in `directory` does not fit `lora` and this model. Reads no tensor."""
    directory = Path(directory)
    try:
        saved = read_foreign_json(directory / ADAPTER_CONFIG)
        header = read_header(directory / ADAPTER_WEIGHTS)
    except (OSError, ValueError) as error:
        needed = f"name the directory with {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}"
        return [f"no adapter in PEFT's format: {getattr(error, 'strerror', None) or error}; {needed}"]
    except ModelError as error:
        return list(error.problems)
    out = []
    for key, expected in (("r", lora.r), ("lora_alpha", lora.alpha)):
        if saved.get(key) != expected:
            setting = f"model.lora.{key.removeprefix('lora_')}"
            out.append(f"{ADAPTER_CONFIG}: {key} = {saved.get(key)!r}, {setting} = {expected:g}; use the same")
    for key, value in {"peft_type": None, **saved}.items():
        values = _VALUES.get(key, ())
        neutral = key != "peft_type" and (value is None or value is False or value == [])
        if key not in _OTHERS and not neutral and value not in values:
            only = f", only {', '.join(map(repr, values))}" if values else ""
            reason = "the model may not be W x + (alpha / r) B A x; merge the adapter into its model (merge_and_unload)"
            out.append(f"{ADAPTER_CONFIG}: {key} = {value!r} is not supported{only}: {reason}")
    shapes = adapter_shapes(config, lora)
    if left_out := [name for name in shapes if not _is_chosen(name, saved, config.num_layers)]:
        selection = ", ".join(f"{key} = {saved.get(key)!r}" for key in _OTHERS[-3:])
        out.append(f"{ADAPTER_CONFIG}: {selection}: leaves out {left_out[0]}; name every layer of model.lora.targets")
    mismatches = shape_problems(shapes, header)
    if mismatches:
        mismatches[0] += "; use the model.lora.r and model.lora.targets that it was made with, and no other tensors"
    return out + mismatches


def _is_chosen(tensor: str, saved: Mapping[str, Any], layers: int) -> bool:
    """Return whether PEFT adapts an adapter tensor's layer, with the saved settings."""
    layer = tensor.removeprefix(PEFT_PREFIX).partition(".lora_")[0]

    def named(by: Any) -> bool:
        if isinstance(by, str):
            return by == "all-linear" or re.fullmatch(by, layer) is not None
        return is_target(layer, by or ())

    layer_ids, every = saved.get("layers_to_transform"), set(range(layers))
    try:
        everywhere = layer_ids in (None, []) or every <= ({layer_ids} if isinstance(layer_ids, int) else {*layer_ids})
        return everywhere and named(saved.get("target_modules")) and not named(saved.get("exclude_modules"))
    except (TypeError, re.error):  # a value without PEFT's type
        return False


def _join(staging: Path, parts: Sequence[Part]) -> None:
    """Join the parts into the single file that PEFT reads."""
    tensors: dict[str, Tensor] = {}
    for part in parts:
        with safe_open(staging / part.file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in part.names}
    save_file(tensors, staging / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    for part in parts:
        (staging / part.file).unlink()


def _config(lora: LoraConfig, base: str | Path) -> dict[str, Any]:
    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    return {
        "base_model_name_or_path": str(base),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": lora.r,
        "target_modules": list(lora.targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
