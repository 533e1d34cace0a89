"""Import the user's rewards and objectives from the directory in which a run is started."""

from __future__ import annotations

import os
import sys


def put_on_path() -> None:
    """Let imports look in the working directory last, as a console script, unlike `python -m`, does not by itself."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
