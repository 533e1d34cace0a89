"""Reads model sizes as in config.json files."""

from pathlib import Path
from typing import Any

import yaml

Models = dict[str, dict[str, Any]]


def read_models(name: str, known: Models | None = None) -> Models:
    """Return the configs of `tests/data/<name>.yaml`. A config also gets the fields of models in the list `like`.

    These models are in the same file or in `known`. Names that begin with . have fields that several models share.
    """
    models = dict(known or {})
    for model, config in yaml.safe_load((Path(__file__).parents[1] / "data" / f"{name}.yaml").read_text()).items():
        models[model] = {}
        for like in (*(models[other] for other in config.pop("like", ())), config):
            models[model] |= like
    return {model: config for model, config in models.items() if model not in (known or {})}


PUBLISHED = {model: config for model, config in read_models("published_models").items() if not model.startswith(".")}
