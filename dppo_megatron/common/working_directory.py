"""Make the user's rewards and objectives importable from the directory where a run is started."""

from __future__ import annotations

import os
import sys


def put_on_path() -> None:
    """Add the working directory as the last import path; a console script, unlike `python -m`, does not add it."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
