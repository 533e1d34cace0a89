"""Every process that a test starts finds this repository, `tests` included, before anything else."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]
PATHS = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(PATHS))
