"""Attacks from outside, drawn at random from a seed, so that each can be repeated.

ATTACK_SEED draws others (default 1). ATTACK_CASES is how many of each kind are tried (default: each test's own number).
A fault that an attack found has a test of its own, in the tests of the corrected room.
"""

import os
import random


def cases(usual: int) -> int:
    """How many cases of one kind to try."""
    return int(os.environ.get("ATTACK_CASES", usual))


def generator(*case: object) -> random.Random:
    """The source of randomness of one case, e.g. `generator("config", 17)`; another for every ATTACK_SEED."""
    return random.Random(repr((os.environ.get("ATTACK_SEED", "1"), *case)))
