"""Sizes of models, as config.json files have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def read_models(name: str) -> dict[str, dict[str, Any]]:
    """Return the configs of `tests/data/<name>.yaml`; a name that begins with . has what several of them share."""
    return yaml.safe_load((Path(__file__).parents[1] / "data" / f"{name}.yaml").read_text())


PUBLISHED = {model: config for model, config in read_models("published_models").items() if not model.startswith(".")}
