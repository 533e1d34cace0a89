"""Provides the smallest config, as a base for all tests."""

from pathlib import Path
from typing import Any

import yaml

from dppo_megatron.config import Config

REQUIRED = {
    "run": {"dir": "unused"},
    "model": {"path": "unused"},
    "data": {"train": "unused.jsonl"},
    "train": {"steps": 1},
}


def write_config_file(directory: Path, **sections: Any) -> Path:
    """Write REQUIRED, updated by `sections`, to config.yaml."""
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(_tree(sections)))
    return path


def _tree(sections: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: REQUIRED.get(name, {}) | sections.get(name, {}) for name in dict.fromkeys((*REQUIRED, *sections))}


def make_config(**sections: dict[str, Any]) -> Config:
    """Return REQUIRED, updated by `sections` section by section. Checks types and names, but not paths."""
    return Config.model_validate(_tree(sections))
