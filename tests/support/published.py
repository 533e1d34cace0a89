"""Sizes of models, as config.json files have them."""

from pathlib import Path
from typing import Any

import yaml

Models = dict[str, dict[str, Any]]


def read_models(name: str, known: Models | None = None) -> Models:
    """Return the configs of `tests/data/<name>.yaml`, each with those of the models that it is `like`.

    These are of the same file or `known`. A name that begins with . has what several models share.
    """
    models = dict(known or {})
    for model, config in yaml.safe_load((Path(__file__).parents[1] / "data" / f"{name}.yaml").read_text()).items():
        models[model] = {}
        for like in (*(models[other] for other in config.pop("like", ())), config):
            models[model] |= like
    return {model: config for model, config in models.items() if model not in (known or {})}


PUBLISHED = {model: config for model, config in read_models("published_models").items() if not model.startswith(".")}
