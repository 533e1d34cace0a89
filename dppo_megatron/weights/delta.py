"""A version of the weights as what changed since the version before it, on storage that trainer and engines share.

The directory of such a version, a delta, holds no model. `delta.json` names the directory beside it that it changes:
a model, or a delta of its own. Its safetensors files hold, of each tensor of which a bit changed:

    NAME:gaps    int16 [N]  elements from one entry to the next; from element 0 to the first entry
    NAME:values  [N]        what these elements become, in the tensor's dtype
    NAME:checks  int64 [2]  checksums of the tensor before and after

and NAME, the tensor as a whole, instead of gaps and values where it takes no more room. An entry that is further than
`FAR` from the one before it has others in between, which repeat what is there. Earlier releases wrote NAME:sums
instead of NAME:checks, sums of the 64-bit words regardless of their order.

So a directory says by itself what the weights are, whatever an engine holds that reads it.

In need of torch and safetensors alone, and of no other module: an SGLang server loads this file by its path.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

FILE = "delta.json"
_SPAN = 1 << 15  # words of a checksum that are weighted at a time: they stay in a CPU's cache
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, as a signed number: of splitmix64
FAR = 2**15 - 1
SHOWN = 5  # names in an error
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DamagedDelta(RuntimeError):
    """A delta cannot be read, or the tensors that it changes are not those that it was made for."""


class Change(NamedTuple):
    """Of one tensor: element `positions` [N] int64 (ascending) of the flat tensor were `old` and become `new` [N].

    positions: None where all of it is sent; `old` and `new` are the whole tensors then.
    """

    positions: torch.Tensor | None
    old: torch.Tensor
    new: torch.Tensor
    changed: int  # elements with other bits
    sums: tuple[int, int]

    def stored(self, name: str) -> dict[str, torch.Tensor]:
        """What the files hold of it."""
        sums = {f"{name}:checks": torch.tensor(self.sums)}
        if self.positions is None:
            return {name: self.new} | sums
        gaps = self.positions.diff(prepend=self.positions.new_zeros(1)).to(torch.int16)
        return {f"{name}:gaps": gaps, f"{name}:values": self.new} | sums


@torch.no_grad()
def change(old: torch.Tensor, new: torch.Tensor) -> Change | None:
    """From `old` to `new`, tensors on the CPU of one shape and dtype; None where every bit is the same."""
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        raise ValueError(f"{tuple(new.shape)} {new.dtype} cannot change {tuple(old.shape)} {old.dtype}")
    before, after = _words(old), _words(new)
    differ = before != after  # an eighth of the comparisons and less, and hardly any further ones
    words = int(differ.count_nonzero())
    if not words:
        return None
    sums = (checksum(old), checksum(new))
    most = new.nbytes // (2 + new.itemsize)  # entries that take less room than the whole
    positions = _positions(before, after, differ, new.itemsize) if words < most else None
    changed = int((_bits(_flat(old)) != _bits(_flat(new))).count_nonzero()) if positions is None else len(positions)
    if positions is not None:
        positions = _reachable(positions)
    if positions is None or len(positions) > most:
        return Change(None, old, new, changed, sums)
    return Change(positions, _flat(old)[positions], _flat(new)[positions], changed, sums)


def _positions(before: torch.Tensor, after: torch.Tensor, differ: torch.Tensor, itemsize: int) -> torch.Tensor:
    """Of the elements with other bits."""
    words = differ.nonzero().squeeze(1)
    old, new = (_bits(side[words].view(torch.uint8), itemsize).view(len(words), -1) for side in (before, after))
    word, place = (old != new).nonzero(as_tuple=True)
    return words[word] * (8 // itemsize) + place


def _reachable(positions: torch.Tensor) -> torch.Tensor:
    """`positions` with others in between, so that no gap is larger than `FAR`."""
    before = torch.cat([positions.new_zeros(1), positions[:-1]])
    missing = ((positions - before - 1) // FAR).clamp_(min=0)
    if not bool(missing.any()):
        return positions
    starts = missing.cumsum(0) - missing
    number = torch.arange(int(missing.sum())) - starts.repeat_interleave(missing) + 1
    return torch.cat([positions, before.repeat_interleave(missing) + FAR * number]).sort().values


def checksum(tensor: torch.Tensor, places: bool = True) -> int:
    """Sum of a mix of each 64-bit word and its place, modulo 2**64 (as a signed number); else of the words only."""
    words, total = _words(tensor), 0
    if not places:
        return int(words.sum())
    factor = torch.arange(1, 1 + min(len(words), _SPAN)) * _MIX | 1
    for span, part in enumerate(words.split(_SPAN), 1):
        mixed = part * factor[: len(part)]
        total += int((mixed ^ (mixed >> 29)).sum()) * (span * _MIX | 1)
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def chain(directory: Path) -> tuple[Path, list[Path]]:
    """The model from which the version in `directory` is made, and the deltas that change it, in order. Raises
    `DamagedDelta`; that the model is there, and whole, is not looked at."""
    deltas: list[Path] = []
    while is_delta(directory):
        deltas.insert(0, directory)
        try:
            base = json.loads((directory / FILE).read_text())["base"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedDelta(f"{directory / FILE}: not readable: {error!r}") from None
        if not isinstance(base, str) or Path(base).name != base or directory.with_name(base) in deltas:
            raise DamagedDelta(f"{directory / FILE}: {str(base)[:100]!r} is no directory beside it that it can change")
        directory = directory.with_name(base)
    return directory, deltas


def is_delta(directory: Path) -> bool:
    return (directory / FILE).exists()


def write_base(directory: Path, base: str) -> None:
    """Makes `directory` a delta that changes the version in the directory `base` beside it."""
    (directory / FILE).write_text(json.dumps({"format": 1, "base": base}) + "\n")


class Version:
    """The tensors of a version, in a directory that holds a model or a delta.

    Opening reads headers. Raises `DamagedDelta`, as its methods, for files that cannot be read and for checksums that
    are not those of the delta.
    """

    def __init__(self, directory: Path):
        self.directory = Path(directory)
        self.model, deltas = chain(self.directory)
        self._model = _Files(self.model)
        self._deltas = [_Files(delta) for delta in deltas]
        unknown = self.changed - self._model.names.keys()
        if unknown:
            some = ", ".join(sorted(unknown)[:SHOWN])
            raise DamagedDelta(f"{directory}: changes tensors that {self.model} lacks ({some})")

    @property
    def names(self) -> list[str]:
        return list(self._model.names)

    @property
    def changed(self) -> set[str]:
        """Names of the tensors that are not as in the model."""
        return {_tensor(name) for delta in self._deltas for name in delta.names}

    def is_in(self, directory: Path) -> bool:
        """Whether `directory` still holds it: its name is that of the version, which is written again only as a whole,
        in the place of a delta that no engine took."""
        return self.directory == directory and is_delta(directory) == bool(self._deltas)

    @property
    def model_bytes(self) -> int:
        """Of its tensors."""
        return sum(file.stat().st_size for file in self._model.files)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self.tensor(name)) for name in self._model.names)

    @torch.no_grad()
    def tensor(self, name: str) -> torch.Tensor:
        """On the CPU; a view of a mapped file where nothing changed it."""
        tensor = self._model.get(name)
        info = (tensor.shape, tensor.dtype)
        flat = after = None
        for delta in self._deltas:
            places = f"{name}:checks" in delta.names
            sums = delta.find(f"{name}:{'checks' if places else 'sums'}")
            if sums is None:
                continue
            before, result = sums.tolist() if sums.shape == (2,) else (None, None)
            if after is not None and after[1] is places and after[0] != before:
                raise DamagedDelta(f"{delta.directory}: {name} is not what the version before it made of it")
            after, whole = (result, places), delta.find(name)
            if whole is not None:
                if (whole.shape, whole.dtype) != info:
                    raise DamagedDelta(f"{delta.directory}: {name} has another shape or dtype than in {self.model}")
                tensor, flat = whole, None
                continue
            if flat is None:
                flat = tensor.reshape(-1).clone()
            positions = delta.get(f"{name}:gaps").to(torch.int64).cumsum(0)
            if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < len(flat):
                raise DamagedDelta(f"{delta.directory}: {name} has entries outside its {len(flat)} elements")
            values = delta.get(f"{name}:values")
            if (values.shape, values.dtype) != (positions.shape, info[1]):
                raise DamagedDelta(f"{delta.directory}: {name} has {len(values)} values for {len(positions)} entries")
            _bits(flat)[positions] = _bits(values)
        result = tensor if flat is None else flat.view(tensor.shape)
        if after is not None and checksum(result, after[1]) != after[0]:
            raise DamagedDelta(f"{self.directory}: {name} has another checksum than the trainer wrote down")
        return result


class _Files:
    """The safetensors files of one directory."""

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


def _tensor(name: str) -> str:
    return name.partition(":")[0]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1)


def _bits(tensor: torch.Tensor, itemsize: int | None = None) -> torch.Tensor:
    return tensor.view(_BITS[itemsize or tensor.itemsize])


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes as int64, with zeros after the last."""
    raw = _flat(tensor).view(torch.uint8)
    if len(raw) % 8:
        raw = torch.nn.functional.pad(raw, (0, -len(raw) % 8))
    elif raw.storage_offset() % 8:
        raw = raw.clone()
    return raw.view(torch.int64)
