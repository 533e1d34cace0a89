"""One Slurm for all tests of this directory, and runs small enough for two cores."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from lab import Lab, why_not

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples" / "quickstart"))


@pytest.fixture(scope="session")
def lab(tmp_path_factory) -> Lab:
    if reason := why_not():
        pytest.skip(reason)
    lab = Lab(tmp_path_factory.mktemp("slurm") / "lab")
    yield lab
    lab.close()
