"""Reading a version of the weights while an engine goes on sampling, so that it pauses for the loading alone.

A server's workers are told to read, go on with their work, are asked until all have read, and only then paused and
told to load. What is read is made (model and deltas), compared with the checksums and kept in the host's memory, as
far as a budget allows; what does not fit is read within the pause. So a damaged delta is found before anything stops.

In need of torch alone, and of no other module: an SGLang server loads this file by its path.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import torch


class Ahead:
    """One `weights.delta.Version` that a thread of its own reads, and whoever loads it takes from here.

    most_bytes: of tensors kept at a time, and one more.
    """

    def __init__(self, version: Any, most_bytes: int):
        self.version = version
        self.read_s = 0.0  # in which whoever loads waited for files and for what is made of them
        self._kept: dict[str, torch.Tensor] = {}
        self._wanted = True
        self._problem: Exception | None = None
        self._thread = threading.Thread(target=self._read, args=(most_bytes,), name="weights-ahead", daemon=True)
        self._thread.start()

    def drop(self) -> None:
        """Nobody will take it."""
        self._wanted = False
        self._thread.join()
        self._kept.clear()

    def finished(self) -> bool:
        """Whether the thread is done. Raises what it raised."""
        if self._thread.is_alive():
            return False
        if self._problem is not None:
            raise self._problem
        return True

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All of the version; each is let go when it is taken, and read anew when it is taken again."""
        began = time.perf_counter()
        self._thread.join()
        self.finished()
        for name in self.version.names:
            tensor = self._kept.pop(name, None)
            if tensor is None:
                tensor = self.version.tensor(name)
            self.read_s += time.perf_counter() - began
            yield name, tensor
            began = time.perf_counter()

    def _read(self, most_bytes: int) -> None:
        try:
            made, size = self.version.changed, 0
            for name in self.version.names:
                if size >= most_bytes or not self._wanted:
                    break
                if name in made:  # the others are mapped files
                    self._kept[name] = self.version.tensor(name)
                    size += self._kept[name].nbytes
        except Exception as error:  # a thread's own would be lost
            self._problem = error
