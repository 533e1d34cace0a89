"""What tests of the conversion commands have in common."""

from __future__ import annotations

import os


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **variables}
