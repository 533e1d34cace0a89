"""Serialize arrays as a safetensors file. Strided arrays are copied, because `save` writes memory in storage order."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from safetensors.numpy import save


def packed(arrays: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None) -> bytes:
    """Return the file's bytes."""
    return save({name: np.ascontiguousarray(array) for name, array in arrays.items()}, metadata)
