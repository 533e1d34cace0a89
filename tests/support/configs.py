"""The smallest config, which the tests of every room build theirs on."""

from __future__ import annotations

from typing import Any

from dppo_megatron.config import Config

REQUIRED = {
    "run": {"dir": "unused"},
    "model": {"path": "unused"},
    "data": {"train": "unused.jsonl"},
    "train": {"steps": 1},
}


def make_config(**sections: dict[str, Any]) -> Config:
    """REQUIRED, to which `sections` are added section by section. Types and names are checked, paths are not."""
    names = dict.fromkeys((*REQUIRED, *sections))
    return Config.model_validate({name: REQUIRED.get(name, {}) | sections.get(name, {}) for name in names})
