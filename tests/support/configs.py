"""The smallest config, which the tests of every room build theirs on."""

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
    """Write REQUIRED, to which `sections` are added, to config.yaml."""
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(_tree(sections)))
    return path


def _tree(sections: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: REQUIRED.get(name, {}) | sections.get(name, {}) for name in dict.fromkeys((*REQUIRED, *sections))}


def make_config(**sections: dict[str, Any]) -> Config:
    """REQUIRED, to which `sections` are added section by section. Types and names are checked, paths are not."""
    return Config.model_validate(_tree(sections))
