"""The ranks that the tests of vocab_parallel start serve the worked cases too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "vocab_parallel"))
