"""Every failure names the seed that repeats it."""

from __future__ import annotations

import os


def pytest_report_header() -> str:
    environment = (f"{name}={os.environ.get(name, 'default')}" for name in ("ATTACK_SEED", "ATTACK_CASES"))
    return f"attack: {' '.join(environment)}"
