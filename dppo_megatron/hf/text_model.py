"""Reads the text model in a directory that also has a vision model, for `convert hf-to-hf`.

Published Qwen3.5 directories have the text model's keys in `text_config` and the text model's tensors below
`model.language_model`. Some stack all experts in a layer into one tensor, with gate rows above up rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dppo_megatron.common.files import read_foreign_json

from .families import FAMILIES
from .hf_config import HFModelConfig
from .parse_config import parse_hf_config
from .safetensors_file import TensorInfo
from .weight_source import WeightSource

_ABOVE = ("tie_word_embeddings", "quantization_config", "dtype", "torch_dtype")  # keys that may be outside text_config
_LEFT_OUT = re.compile(r"(model\.)?visual\..*")
_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj")


def text_config(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the text model's config.json from `raw`, or None if `raw` does not describe a model with vision."""
    architectures, text = raw.get("architectures"), raw.get("text_config")
    for family in FAMILIES.values():
        if family.wrapper is not None and architectures == [family.wrapper] and isinstance(text, Mapping):
            outer = {name: raw[name] for name in _ABOVE if name in raw}
            return {**outer, **text, "architectures": [family.architecture], "model_type": family.name}
    return None


def read_text_config(directory: Path) -> HFModelConfig | None:
    """Return the text model's config for a directory with a vision model, or None for other directories.

    Raises `ModelError` as `parse_hf_config` does.
    """
    try:
        raw = read_foreign_json(directory / "config.json")
    except (OSError, ValueError):
        return None
    text = text_config(raw)
    return None if text is None else parse_hf_config(text, f"text_config of {directory / 'config.json'}")


class TextWeights:
    """Provides the text model's tensors under the names in a text-only directory; a `WeightSource`."""

    def __init__(self, stored: WeightSource):
        self._stored = stored
        self._places: dict[str, tuple[str, int | None, slice]] = {}  # tensor, expert, row range
        self.tensors: dict[str, TensorInfo] = {}
        for name, info in stored.tensors.items():
            if not _LEFT_OUT.fullmatch(name):
                self._place(name, info)

    def _place(self, stored: str, info: TensorInfo) -> None:
        name = stored.replace("model.language_model.", "model.", 1)
        match = _EXPERTS.fullmatch(name)
        if match is None:
            self._places[name], self.tensors[name] = (stored, None, slice(None)), info
            return
        experts, rows, columns = info.shape
        parts = {"down": slice(rows)}
        if match[2] == "gate_up":
            parts = {"gate": slice(rows // 2), "up": slice(rows // 2, rows)}
        for expert in range(experts):
            for part, part_rows in parts.items():
                weight_name = f"{match[1]}.{expert}.{part}_proj.weight"
                self._places[weight_name] = stored, expert, part_rows
                self.tensors[weight_name] = TensorInfo(info.dtype, (rows // len(parts), columns))

    def tensor(self, name: str) -> Tensor:
        stored, expert, rows = self._places[name]
        tensor = self._stored.tensor(stored)
        return tensor if expert is None else tensor[expert][rows]

    def release(self) -> None:
        self._stored.release()
