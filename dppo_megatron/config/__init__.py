"""Reads the typed settings tree from YAML and dotted overrides."""

from .load import ConfigError, read_config, read_tree, save_resolved, validated, with_absolute_paths, with_settings
from .schema import Config

__all__ = [
    "Config", "ConfigError", "read_config", "read_tree", "save_resolved", "validated", "with_absolute_paths",
    "with_settings",
]  # fmt: skip
