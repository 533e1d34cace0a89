"""Rule of `engine.secret_file`: the run can read what the servers are to be sent."""

from __future__ import annotations

import os

from dppo_megatron.config import Config


def problems(config: Config) -> list[str]:
    path = config.engine.secret_file
    if path is None or (path.is_file() and os.access(path, os.R_OK)):
        return []
    return [
        f"engine.secret_file = {path}: no file that can be read; it holds the DPPO_SECRET of the servers of "
        "engine.urls. Remove the setting where the run starts its engines"
    ]
