"""Defines a reward that blocks the run after the second step until the test opens a gate."""

import os
import time
from pathlib import Path

HELD_FROM_STEP, GROUPS = 2, 4


def even_digits(prompt, response_text: str) -> float:
    while prompt.position >= HELD_FROM_STEP * GROUPS and not Path(os.environ["SLURM_TEST_GATE"]).exists():
        time.sleep(0.05)
    return sum(c in "02468" for c in response_text) / 4


even_digits.trusted = True
