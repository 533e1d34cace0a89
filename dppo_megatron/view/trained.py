"""Reads the tokens that the trainer stored (`tracking.token_sequences`) in the files of `trainer/token_log.py`."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from dppo_megatron.run_dir import RunDir

from .source import Source

VALUES = ("logprob", "entropy", "divergence", "masked")
_Place = tuple[Path, slice]


class TrainedTokens:
    """Contains stored tokens by prompt position and sample. With context parallelism several files share a sequence."""

    def __init__(self, source: Source):
        self.positions: set[int] = set()
        self._places: dict[tuple[int, int], list[_Place]] = {}
        self._masked: dict[tuple[int, int], tuple[int, int]] = {}  # (masked tokens, tokens)
        self._read = lru_cache(maxsize=8)(_values)  # groups are read in the order of the files
        paths = sorted(RunDir(source.root).tokens.glob("step-*.safetensors")) if source.is_run else []
        for path in paths:
            try:
                self._add(path)
            except (OSError, ValueError, SafetensorError) as error:
                source.notes.append(f"{path}: not read: {error}")

    def masked_share(self, position: int, sample: int) -> float:
        masked, tokens = self._masked.get((position, sample), (0, 0))
        return masked / tokens if tokens else float("nan")

    def of(self, position: int, sample: int, size: int) -> np.ndarray:
        """Return VALUES of every sampled token, fp32 [4, size]. Values that are not stored are NaN."""
        found = np.full((len(VALUES), size), np.nan, np.float32)
        for path, part in self._places.get((position, sample), ()):
            index, values = self._read(path)
            own = index[part]
            if len(own) == part.stop - part.start and own.min() >= 0 and own.max() < size:  # else of another sample
                found[:, own] = values[:, part]
        return found

    def _add(self, path: Path) -> None:
        with safe_open(path, "np") as file:
            names = ("position", "sample", "counts", "masked")
            positions, samples, counts, masked = map(file.get_tensor, names)
        ends = np.cumsum(counts)
        if len(counts) and (counts.min() < 1 or ends[-1] != len(masked)):
            raise ValueError(f"{len(masked)} values, but its counts add up to {ends[-1]}")
        for position, sample, end, count in zip(positions, samples, ends, counts, strict=True):
            key, part = (int(position), int(sample)), slice(int(end - count), int(end))
            self._places.setdefault(key, []).append((path, part))
            self.positions.add(key[0])
            before = self._masked.get(key, (0, 0))
            self._masked[key] = before[0] + int(masked[part].sum()), before[1] + int(count)


def _values(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return (index [N], VALUES fp32 [4, N]). Both are empty if the file has changed since it was opened."""
    try:
        with safe_open(path, "np") as file:
            return file.get_tensor("index"), np.stack([file.get_tensor(name).astype(np.float32) for name in VALUES])
    except (OSError, ValueError, SafetensorError):
        return np.zeros(0, np.int32), np.zeros((len(VALUES), 0), np.float32)
