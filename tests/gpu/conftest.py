"""The cases, their reference and the ranks are those of vocab_parallel's tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "vocab_parallel"))
