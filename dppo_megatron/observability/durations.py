"""Times as people read them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """h:mm:ss"""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}"
