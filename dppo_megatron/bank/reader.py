"""Read a bank, from any number of processes, while the writer appends."""

from __future__ import annotations

import os
import time
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path

import numpy as np

from dppo_megatron.types import PARTS, Prompt, Rollout, RolloutGroup

from .blob import decode_front, decode_sample
from .entry import BankEntry
from .errors import RESTORE, BankCorruption, BankTimeout, not_accessible
from .files import Head, ReadBuffer, is_local, prefetch, read_up_to, segment_files, segment_paths
from .ledger import Ledger
from .lines import stored_entry

Front = tuple[Prompt, list[str]]  # the prompt, every sample's finish reason
FRONTS = 256  # fronts that a reader keeps
LAG_S = 60.0  # how long a network file system may cache that a file is missing or shorter


class BankReader:
    """Follows the bank in `directory`, which need not exist yet.

    Keeps 40 bytes per group in memory; index lines and tokens are read on demand. For each new line, the reader checks
    the crc32, whether the line may follow the earlier lines, and whether the files that `head.json` names exist.
    ledger: the ledger of a writer in this process; the reader then reads no index and has the writer's groups.
    """

    def __init__(self, directory: str | Path, ledger: Ledger | None = None):
        self.directory = Path(directory)
        self._ledger = ledger or Ledger(self.directory)
        self._follows = ledger is None
        self._missing_since: float | None = None
        self._fronts: OrderedDict[int, tuple[BankEntry, Front]] = OrderedDict()  # the fronts read last, by group

    @property
    def num_groups(self) -> int:
        """Return the number of groups that the last `refresh` found."""
        return len(self._ledger.segments)

    def row(self, number: int) -> int:
        """Return the prompt file's row for group `number` in the training order. Reads no file."""
        return self._ledger.rows[number]

    def refresh(self) -> int:
        """Read the lines added to the index since the last call; return `num_groups`.

        Raises `BankCorruption` when the index shrank, a line cannot follow or a file is missing. On a network file
        system, this error is raised only if the problem persists for a minute.
        """
        if not self._follows:
            return self.num_groups
        # Read the head before the index: all files that the head names existed when it was written.
        head = Head.read(self.directory)
        while True:
            # Checked before reading: once the next segment exists, nothing is added to this segment.
            finished = self._exists(segment_files(self.directory, self._ledger.segment + 1)[1])
            try:
                with suppress(FileNotFoundError):
                    self._ledger.read()  # a line without newline is still being written
                if not finished:
                    break
                self._ledger.next_segment()
            except OSError as error:
                raise not_accessible(Path(self._ledger.index_path), error) from error
            except BankCorruption as error:
                # A later part of another host's writes may appear first; the earlier part then reads as zeros.
                return self._not_there(str(error))
        problem = self._ledger.contradiction(head)
        if problem and head == Head.read(self.directory):  # otherwise the writer has continued
            return self._not_there(problem)
        self._missing_since = None
        return self.num_groups

    def wait_for(self, count: int, timeout_s: float, poll_s: float = 0.01) -> int:
        """Return `num_groups` once it is at least `count`.

        timeout_s: longest time without any new group, from the call or the last arrival.
        Raises `BankTimeout`.
        """
        started = last_arrival = time.monotonic()
        at_start = self.num_groups
        while True:
            previous_count = self.num_groups
            if self.refresh() >= count:
                return self.num_groups
            now = time.monotonic()
            if self.num_groups > previous_count:
                last_arrival = now
            if now - last_arrival > timeout_s:
                idle = now - last_arrival
                arrived = self.num_groups - at_start
                raise BankTimeout(
                    f"{self.directory}: {self.num_groups} of {count} groups arrived and none for "
                    f"{idle:.1f} s ({arrived} in the {now - started:.1f} s of this wait; timeout {timeout_s:g} s). "
                    "Look at the orchestrator's log"
                )
            time.sleep(poll_s)

    def entries(self, start: int, stop: int) -> list[BankEntry]:
        """Read the index lines of groups [start, stop) in the training order from disk, without tokens.

        Raises `IndexError` when `stop` exceeds `num_groups`.
        """
        if not 0 <= start <= stop <= self.num_groups:
            raise IndexError(f"{self.directory}: groups [{start}, {stop}) of {self.num_groups}; call refresh first")
        entries: list[BankEntry] = []
        for segment, numbers in groupby(range(start, stop), key=self._ledger.segments.__getitem__):
            entries += self._entries_of_segment(segment, list(numbers))
        return entries

    def segments(self) -> list[tuple[int, int]]:
        """Return every segment's groups as [start, stop) in the training order: one segment per step."""
        numbers = np.array(self._ledger.segments)
        ends = [*(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
        return [(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True) if b > a]

    def prefetch(self, requests: Iterable[tuple[BankEntry, Sequence[int]]], parts: Sequence[str] = PARTS) -> int:
        """Ask the system to fetch the bytes that `read` needs for these samples; return how many, without waiting.

        This is only a hint: the bytes are not checked, and missing files raise no error.
        """
        total = 0
        for segment, group in groupby(requests, key=lambda request: request[0].segment):
            spans = [span for entry, samples in group for span in _spans(entry, samples, parts)]
            total += sum(end - begin for begin, end in spans)
            with suppress(OSError), segment_paths(self.directory, segment)[0].open("rb", buffering=0) as file:
                data_size = os.fstat(file.fileno()).st_size  # entries are not checked yet
                for begin, end in spans:
                    prefetch(file.fileno(), begin, min(end, data_size))
        return total

    def read(
        self,
        entry: BankEntry,
        samples: Sequence[int] | None = None,
        parts: Sequence[str] = PARTS,
        buffer: ReadBuffer | None = None,
    ) -> RolloutGroup:
        """Read an entry's group, or only the given samples, in the given order.

        parts: a selection of `types.PARTS` that includes `core`; columns in other parts are not read and are None.
        buffer: memory for the samples' arrays, valid until the buffer is reused. None: the arrays get new memory.
        Raises `BankCorruption` when bytes are missing, do not match their checksum or contradict the entry.
        """
        path = segment_paths(self.directory, entry.segment)[0]
        index = segment_paths(self.directory, entry.segment)[1].name
        where = f"{path}: group {entry.number} (line {entry.line} of {index})"
        sample_indices = range(entry.num_samples) if samples is None else samples
        try:
            with path.open("rb", buffering=0) as file:
                return read_samples(
                    file.fileno(), entry, sample_indices, parts, self._front(file.fileno(), entry), buffer
                )
        except FileNotFoundError:
            raise BankCorruption(f"{where}: the file is gone; restore it, or train from a later step") from None
        except OSError as error:
            raise not_accessible(path, error) from error
        except ValueError as error:
            raise BankCorruption(f"{where}: {error}; {RESTORE}") from error

    def _front(self, file: int, entry: BankEntry) -> Front:
        """Return an entry's front, cached so that it is checked only once although samples are read a few at a time."""
        cached = self._fronts.get(entry.number)
        if cached is not None and cached[0] is entry:
            return cached[1]
        front = read_front(file, entry)
        self._fronts[entry.number] = entry, front
        if len(self._fronts) > FRONTS:
            self._fronts.popitem(last=False)
        return front

    def _not_there(self, problem: str) -> int:
        """Raise `BankCorruption`, or return and retry later where files of other hosts may appear late."""
        now = time.monotonic()
        if self._missing_since is None:
            self._missing_since = now
        if now - self._missing_since > LAG_S or is_local(self.directory):
            raise BankCorruption(problem)
        return self.num_groups

    def _exists(self, path: str) -> bool:
        if os.path.exists(path):
            return True
        try:
            # NFS may cache for a minute that a file is missing, unless the directory is opened first.
            os.close(os.open(self.directory, os.O_RDONLY))
        except FileNotFoundError:
            return False
        except OSError as error:
            raise not_accessible(self.directory, error) from error
        return Path(path).exists()

    def _entries_of_segment(self, segment: int, numbers: list[int]) -> Iterator[BankEntry]:
        path, ledger = segment_paths(self.directory, segment)[1], self._ledger
        begin = ledger.offsets[numbers[0]]
        end = ledger.offsets[numbers[-1]] + ledger.sizes[numbers[-1]]
        try:
            with path.open("rb", buffering=0) as file:
                lines = os.pread(file.fileno(), end - begin, begin)
        except OSError as error:
            raise not_accessible(path, error) from error
        for number in numbers:
            start = ledger.offsets[number] - begin
            line = lines[start : start + ledger.sizes[number]]
            yield stored_entry(path, line, number, segment, ledger.line_numbers[number])


def read_front(file: int, entry: BankEntry) -> Front:
    """Read the bytes before the samples: prompt and finish reasons. Raises the errors that `read_samples` raises."""
    size, crc = entry.front
    return decode_front(_piece(file, size, entry.offset, crc, "the prompt").tobytes(), entry)


def read_samples(
    file: int,
    entry: BankEntry,
    samples: Sequence[int],
    parts: Sequence[str] = PARTS,
    front: Front | None = None,
    buffer: ReadBuffer | None = None,
) -> RolloutGroup:
    """Read samples of an entry's group.

    file: descriptor of the .bin file. front: result of `read_front` for the entry. Raises `ValueError` and `OSError`.
    """
    prompt, finish = front or read_front(file, entry)
    ends = _ends(entry)
    if ends[-1, -1] != entry.offset + entry.size:
        raise ValueError(f"its parts have {ends[-1, -1] - entry.offset} of {entry.size} bytes")
    rollouts: list[Rollout] = []
    for i in samples:
        pieces = {}
        for p, part in enumerate(PARTS):
            if part in parts:
                size = int(entry.parts[i, p])
                name = f"sample {i}, part {part}"
                pieces[part] = _piece(file, size, int(ends[i, p]) - size, int(entry.part_crc[i, p]), name, buffer)
        rollouts.append(decode_sample(entry, i, finish[i], pieces))
    sample_indices = list(samples)
    group = RolloutGroup(
        prompt=prompt,
        rollouts=tuple(rollouts),
        rewards=entry.rewards[sample_indices],
        reward_failed=entry.reward_failed[sample_indices],
        temperature=entry.temperature,
        turn_rewards=entry.turn_rewards,
    )
    if len(sample_indices) == entry.num_samples:
        version_sum = sum(int(r.versions.sum(dtype=np.int64)) for r in rollouts)
        if version_sum != entry.version_sum:
            raise ValueError(f"its versions sum to {version_sum}, the index line has {entry.version_sum}")
    return group


def _ends(entry: BankEntry) -> np.ndarray:
    """Return [n, 4] int64, the file offset where each sample's parts end."""
    return entry.offset + entry.front[0] + np.cumsum(entry.parts).reshape(entry.parts.shape)


def _spans(entry: BankEntry, samples: Sequence[int], parts: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the file ranges (begin, end) that `read` reads for these samples; adjacent ranges are merged."""
    begin, end = entry.offset, entry.offset + entry.front[0]
    ends, part_indices = _ends(entry), [p for p, part in enumerate(PARTS) if part in parts]
    for i in samples:
        for p in part_indices:
            part_end = int(ends[i, p])
            part_begin = part_end - int(entry.parts[i, p])
            if part_begin != end:
                yield begin, end
                begin = part_begin
            end = part_end
    yield begin, end


def _piece(file: int, size: int, offset: int, crc: int, name: str, buffer: ReadBuffer | None = None) -> np.ndarray:
    """Read [size] uint8 and compare their checksum."""
    piece = read_up_to(file, size, offset, buffer)
    if len(piece) < size:
        raise ValueError(f"{name}: only {len(piece)} of {size} bytes are there")
    if zlib.crc32(piece.data) != crc:
        raise ValueError(f"{name}: the bytes do not match their checksum")
    return piece
