"""Values of unknown length in messages."""

from __future__ import annotations


def shorten(value: object, longest: int = 120) -> str:
    """The value as Python writes it, on one line and without control characters; of a long one the two ends."""
    if isinstance(value, str) and len(value) > 2 * longest:
        value = value[:longest] + value[-longest:]
    text = repr(value)
    half = (longest - 5) // 2
    return text if len(text) <= longest else f"{text[:half]} ... {text[-half:]}"
