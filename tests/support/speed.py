"""How slow this machine is, for tests that bound CPU seconds."""

import time

REFERENCE_S = 0.075  # CPU seconds of the loop on an idle core of 2.45 GHz


def slowness() -> float:
    """Return the time of a loop compared with the reference, at least 1: a busy host shares its cores."""
    times = []
    for _ in range(3):
        start, total = time.process_time(), 0
        for number in range(10**6):
            total += number
        times.append(time.process_time() - start)
    return max(1.0, min(times) / REFERENCE_S)
