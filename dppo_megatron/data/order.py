"""Compute a run's row order. It depends only on seed and position, so a run can resume at any position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class EpochOrder:
    """Orders `count` rows endlessly: each epoch visits each row once, in a new permutation."""

    def __init__(self, count: int, seed: Sequence[int], shuffle: bool):
        """Store the seed: (run seed,) for the first file, (run seed, file number) for each further file."""
        self._count, self._seed, self._shuffle = count, tuple(seed), shuffle
        self._epoch = -1
        self._order = np.zeros(0, dtype=np.int64)

    def row(self, place: int) -> int:
        epoch, index = divmod(place, self._count)
        if epoch != self._epoch:
            self._order, self._epoch = self._permutation(epoch), epoch
        return int(self._order[index])

    def _permutation(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(self._count)
        # numpy guarantees a bit generator's stream, but not the results of Generator.permutation.
        entropy = [self._seed[0], epoch, *self._seed[1:]]
        keys = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(self._count)
        return np.argsort(keys, kind="stable")


class Mixture:
    """Spreads files over positions as evenly as the weights allow. n positions have n * share rows from a file, +- 1.

    The k-th prompt of a file is due at (k + 1/2) / share, and positions are numbered by due time. Example: shares 2/3
    and 1/3 give due times 0.75, 2.25, 3.75, ... and 1.5, 4.5, ...: files 0, 1, 0, 0, 1, 0, ...
    """

    def __init__(self, weights: Sequence[float]):
        self._shares = np.array(weights, dtype=np.float64) / np.sum(np.array(weights, dtype=np.float64))
        self._files = np.zeros(0, dtype=np.int64)  # by position
        self._places = np.zeros(0, dtype=np.int64)  # index in the file's order, by position

    def at(self, position: int) -> tuple[int, int]:
        """Return (file, index in the file's order) for a position."""
        if len(self._shares) == 1:
            return 0, position
        if position >= len(self._files):
            self._extend(max(1024, 2 * (position + 1)))
        return int(self._files[position]), int(self._places[position])

    def _extend(self, size: int) -> None:
        counts = np.ceil(size * self._shares).astype(np.int64) + len(self._shares)
        files = np.repeat(np.arange(len(counts)), counts)
        places = np.concatenate([np.arange(count) for count in counts])
        order = np.lexsort((files, (places + 0.5) / self._shares[files]))[:size]
        self._files, self._places = files[order], places[order]
