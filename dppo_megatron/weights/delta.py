"""Store a weights version as the changes since the previous version, on storage that trainer and engines share.

Such a version is a delta, and the directory has no model. `delta.json` names the base, a directory next to the delta
with a model or another delta. The safetensors files have three entries for each tensor with a changed bit:

    NAME:gaps    int16 [N]  elements from the previous entry to this entry; from element 0 to the first entry
    NAME:values  [N]        new values of these elements, in the tensor dtype
    NAME:checks  int64 [2]  tensor checksums before and after

Example: a flat bf16 tensor with 40,003 elements:

    before   element 2 = 0.5    element 40,002 = 1.0
    after    element 2 = 0.75   element 40,002 = 2.0
    entries  positions [2, 32769, 40002], gaps [2, 32767, 7233], values [0.75, unchanged, 2.0]

A gap is at most `FAR` = 32,767, so a longer gap needs filler entries, which repeat the old value. The second entry is a
filler. If a whole tensor takes no more space than gaps and values, the whole tensor is stored instead, as NAME.

Base and deltas therefore define the weights, regardless of the weights in the engine that reads them. `Version` reads
the model and applies the deltas in order, v0 (model) <- v1 <- v2. `PrefetchedVersion` does so before the engine pauses.

Depends only on torch and safetensors, because SGLang servers also import this module.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

FILE = "delta.json"
_SPAN = 1 << 15  # words that a checksum weights at a time: they fit in a CPU's cache
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, as a signed number; from splitmix64
FAR = 2**15 - 1
SHOWN = 5  # names in an error
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DamagedDelta(RuntimeError):
    """A delta cannot be read, or does not match the tensors that it changes."""


class Change(NamedTuple):
    """Describes how a flat tensor changes: elements `positions` [N] int64 (ascending) become `new` [N].

    If the whole tensor is sent, `positions` is None and `new` is the whole tensor.
    """

    positions: torch.Tensor | None
    new: torch.Tensor
    changed: int  # elements with other bits
    sums: tuple[int, int]

    def stored(self, name: str) -> dict[str, torch.Tensor]:
        """Return the tensors that the files contain for tensor `name`, by name in the files."""
        sums = {f"{name}:checks": torch.tensor(self.sums)}
        if self.positions is None:
            return {name: self.new} | sums
        gaps = self.positions.diff(prepend=self.positions.new_zeros(1)).to(torch.int16)
        return {f"{name}:gaps": gaps, f"{name}:values": self.new} | sums


@torch.no_grad()
def change(old: torch.Tensor, new: torch.Tensor) -> Change | None:
    """Return the change from CPU tensor `old` to `new` of the same shape and dtype, or None if all bits are equal."""
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        raise ValueError(f"{tuple(new.shape)} {new.dtype} cannot change {tuple(old.shape)} {old.dtype}")
    old_words, new_words = _words(old), _words(new)
    differ = old_words != new_words  # words of 8 bytes; only different words are compared by elements
    words = int(differ.count_nonzero())
    if not words:
        return None
    sums = (checksum(old), checksum(new))
    max_entries = new.nbytes // (2 + new.itemsize)  # upper limit of entries that take less space than the whole tensor
    positions = _positions(old_words, new_words, differ, new.itemsize) if words < max_entries else None
    changed = int((_bits(_flat(old)) != _bits(_flat(new))).count_nonzero()) if positions is None else len(positions)
    if positions is not None:
        positions = _reachable(positions)
    if positions is None or len(positions) > max_entries:
        return Change(None, new, changed, sums)
    return Change(positions, _flat(new)[positions], changed, sums)


def _positions(old_words: torch.Tensor, new_words: torch.Tensor, differ: torch.Tensor, itemsize: int) -> torch.Tensor:
    """Return the positions of the elements with different bits."""
    words = differ.nonzero().squeeze(1)
    old, new = (_bits(side[words].view(torch.uint8), itemsize).view(len(words), -1) for side in (old_words, new_words))
    word, place = (old != new).nonzero(as_tuple=True)
    return words[word] * (8 // itemsize) + place


def _reachable(positions: torch.Tensor) -> torch.Tensor:
    """Return `positions` with fillers, so that no gap is larger than `FAR`: [2, 40002] becomes [2, 32769, 40002]."""
    previous = torch.cat([positions.new_zeros(1), positions[:-1]])
    missing = ((positions - previous - 1) // FAR).clamp_(min=0)
    if not bool(missing.any()):
        return positions
    starts = missing.cumsum(0) - missing
    number = torch.arange(int(missing.sum())) - starts.repeat_interleave(missing) + 1
    return torch.cat([positions, previous.repeat_interleave(missing) + FAR * number]).sort().values


def checksum(tensor: torch.Tensor) -> int:
    """Return the sum of mix(word, position) over all 64-bit words, modulo 2**64, as a signed number."""
    words, total = _words(tensor), 0
    factor = torch.arange(1, 1 + min(len(words), _SPAN)) * _MIX | 1
    for span, part in enumerate(words.split(_SPAN), 1):
        mixed = part * factor[: len(part)]
        total += int((mixed ^ (mixed >> 29)).sum()) * (span * _MIX | 1)
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def chain(directory: Path) -> tuple[Path, list[Path]]:
    """Return the base model for the version in `directory`, and the deltas that change the model, in order.

    Example: for v2 return (v0, [v1, v2]). Raises `DamagedDelta`. Does not check that the model exists and is complete.
    """
    deltas: list[Path] = []
    while is_delta(directory):
        deltas.insert(0, directory)
        try:
            base = json.loads((directory / FILE).read_text())["base"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedDelta(f"{directory / FILE}: not readable: {error!r}") from None
        if not isinstance(base, str) or Path(base).name != base or directory.with_name(base) in deltas:
            raise DamagedDelta(f"{directory / FILE}: base {str(base)[:100]!r} is not an earlier version next to it")
        directory = directory.with_name(base)
    return directory, deltas


def is_delta(directory: Path) -> bool:
    return (directory / FILE).exists()


def write_base(directory: Path, base: str) -> None:
    """Make `directory` a delta that changes the version in the directory `base` next to it."""
    (directory / FILE).write_text(json.dumps({"format": 1, "base": base}) + "\n")


class Version:
    """Provides a version's tensors, from a directory with a model or a delta.

    The constructor reads only headers. Constructor and methods raise `DamagedDelta` for unreadable files and for
    checksums that differ from the delta's.
    """

    def __init__(self, directory: Path):
        self.directory = Path(directory)
        self.model, deltas = chain(self.directory)
        self._model = _Files(self.model)
        self._deltas = [_Files(delta) for delta in deltas]
        unknown = self.changed - self._model.names.keys()
        if unknown:
            examples = ", ".join(sorted(unknown)[:SHOWN])
            raise DamagedDelta(f"{directory}: changes tensors that {self.model} lacks ({examples})")

    @property
    def names(self) -> list[str]:
        return list(self._model.names)

    @property
    def changed(self) -> set[str]:
        """Return the names of tensors that differ from the model."""
        return {name.partition(":")[0] for delta in self._deltas for name in delta.names}

    def is_in(self, directory: Path) -> bool:
        """Return whether `directory` still has this version.

        A delta that no engine has loaded may be replaced by the whole model under the same name.
        """
        return self.directory == directory and is_delta(directory) == bool(self._deltas)

    @property
    def model_bytes(self) -> int:
        return sum(file.stat().st_size for file in self._model.files)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self.tensor(name)) for name in self._model.names)

    @torch.no_grad()
    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor on the CPU. An unchanged tensor is a view of a mapped file."""
        tensor = self._model.get(name)
        shape, dtype = tensor.shape, tensor.dtype
        changed, expected = False, None
        for delta in self._deltas:
            checks = delta.find(f"{name}:checks")
            if checks is None:
                continue
            if checks.shape != (2,):
                raise DamagedDelta(f"{delta.directory}: {name} has {checks.numel()} checksums instead of 2")
            old_checksum, new_checksum = checks.tolist()
            if expected not in (None, old_checksum):
                raise DamagedDelta(f"{delta.directory}: {name} changes other values than those of the previous version")
            expected, whole = new_checksum, delta.find(name)
            if whole is not None:
                if (whole.shape, whole.dtype) != (shape, dtype):
                    raise DamagedDelta(f"{delta.directory}: {name} has a different shape or dtype than in {self.model}")
                tensor, changed = whole, False
                continue
            if not changed:
                tensor, changed = tensor.clone(), True
            flat = tensor.view(-1)
            positions = delta.get(f"{name}:gaps").to(torch.int64).cumsum(0)
            if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < len(flat):
                raise DamagedDelta(f"{delta.directory}: {name} has entries outside its {len(flat)} elements")
            values = delta.get(f"{name}:values")
            if (values.shape, values.dtype) != (positions.shape, dtype):
                raise DamagedDelta(f"{delta.directory}: {name} has {len(values)} values for {len(positions)} entries")
            _bits(flat)[positions] = _bits(values)
        if expected is not None and checksum(tensor) != expected:
            raise DamagedDelta(f"{self.directory}: {name} has another checksum than the trainer recorded")
        return tensor


class PrefetchedVersion:
    """Reads a `Version` in a thread while the engine samples, so that the engine pauses only to load it.

    A server's workers start to read and continue their work. The server polls them until all have read, then pauses
    them to load. Damage is therefore found before sampling stops. Tensors that deltas change are kept in host memory,
    at most `most_bytes` plus one tensor; the others are read when they are loaded.
    """

    def __init__(self, version: Version, most_bytes: int):
        self.version = version
        self.read_s = 0.0  # seconds that the load waited for files and for applying deltas
        self._tensors: dict[str, torch.Tensor] = {}
        self._active = True
        self._problem: Exception | None = None
        self._thread = threading.Thread(target=self._read, args=(most_bytes,), name="weights-prefetch", daemon=True)
        self._thread.start()

    def drop(self) -> None:
        """Stop reading and free the memory."""
        self._active = False
        self._thread.join()
        self._tensors.clear()

    def finished(self) -> bool:
        """Return whether the thread has ended. Raises the thread's error."""
        if self._thread.is_alive():
            return False
        if self._problem is not None:
            raise self._problem
        return True

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all tensors. A prefetched tensor is released when it is yielded; a second call reads it again."""
        began = time.perf_counter()
        self._thread.join()
        self.finished()
        for name in self.version.names:
            tensor = self._tensors.pop(name, None)
            if tensor is None:
                tensor = self.version.tensor(name)
            self.read_s += time.perf_counter() - began
            yield name, tensor
            began = time.perf_counter()

    def _read(self, most_bytes: int) -> None:
        try:
            changed, size = self.version.changed, 0
            for name in self.version.names:
                if size >= most_bytes or not self._active:
                    break
                if name in changed:  # the others are mapped files
                    self._tensors[name] = self.version.tensor(name)
                    size += self._tensors[name].nbytes
        except Exception as error:  # an error in a thread would be lost
            self._problem = error


class _Files:
    """Opens the safetensors files in a directory."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.files = sorted(directory.glob("*.safetensors"))
        self.names: dict[str, safe_open] = {}
        for file in self.files:
            try:
                opened = safe_open(file, framework="pt")
                self.names |= dict.fromkeys(opened.keys(), opened)
            except (OSError, SafetensorError) as error:
                raise DamagedDelta(f"{file}: not a readable safetensors file ({error})") from None

    def get(self, name: str) -> torch.Tensor:
        try:
            return self.names[name].get_tensor(name)
        except (KeyError, OSError, SafetensorError) as error:
            raise DamagedDelta(f"{self.directory}: {name} cannot be read: {error!r}") from None

    def find(self, name: str) -> torch.Tensor | None:
        return self.get(name) if name in self.names else None


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1)


def _bits(tensor: torch.Tensor, itemsize: int | None = None) -> torch.Tensor:
    return tensor.view(_BITS[itemsize or tensor.itemsize])


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes as int64, padded with zeros."""
    raw = _flat(tensor).view(torch.uint8)
    if len(raw) % 8:
        raw = torch.nn.functional.pad(raw, (0, -len(raw) % 8))
    elif raw.storage_offset() % 8:
        raw = raw.clone()
    return raw.view(torch.int64)
