"""A damaged bank is refused by file and line, or read with the content that was written.

Every byte of every index is flipped, every line dropped, repeated and swapped, every file deleted, emptied, shortened
and exchanged, and several of these at once.
"""

import dataclasses
import itertools
import json
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from dppo_megatron.bank import BankError, BankReader, BankWriter
from tests.attack import cases, generator
from tests.support.bank import make_group

CASES = cases(1000)  # of each random kind; every byte is flipped so many / 500 times
SEGMENTS, PER_SEGMENT = 3, 2
MEMORY = "/dev/shm"  # thousands of banks are opened, and each is flushed to its device
LONGEST_MESSAGE = 4096
PLACE = re.compile(r"(segment-\d{6}\.(jsonl|bin)|head\.json)")
LINE = re.compile(r"(line \d+|part \w+|the prompt|missing|gone|bytes|without the line that ends|has no group)")
REMEDY = re.compile(r"(restore it|Restore it|train from a later step|write \{)")

Files = dict[str, bytes]


@dataclasses.dataclass
class Bank:
    """The files of a whole bank, and their contents."""

    directory: Path
    files: Files
    content: list[bytes]  # of every group
    positions: list[int]  # of every group
    done: set[int]
    closed: bool

    def attack(self, name: str, files: Files) -> None:
        """Lays out `files` and opens them with a reader and a writer."""
        changed = [path for path in {*self.files, *files} if self.files.get(path) != files.get(path)]
        for path in changed:
            self._put(path, files.get(path))
        try:
            self._read(name)
            self._write(name)
        finally:
            for path in {*changed, "head.json", *(f.name for f in self.directory.glob("segment-*"))}:
                self._put(path, self.files.get(path))

    def _put(self, path: str, content: bytes | None) -> None:
        if content is None:
            (self.directory / path).unlink(missing_ok=True)
        else:
            (self.directory / path).write_bytes(content)

    def _read(self, name: str) -> None:
        try:
            found = read_all(self.directory)
        except BankError as error:
            check_message(name, str(error))
            return
        # Of a writer that was killed, or still writes, lines may be yet to come: never others than those written.
        wanted = self.content if self.closed else self.content[: len(found)]
        assert found == wanted, f"{name}: the reader gave another content"

    def _write(self, name: str) -> None:
        try:
            with BankWriter(self.directory, PER_SEGMENT, fsync=False) as writer:
                groups, done = writer.num_train_groups, writer.done_positions()
        except BankError as error:
            check_message(name, str(error))
            return
        if self.closed:
            assert (groups, done) == (len(self.content), self.done), f"{name}: the writer lost records"
        else:  # a crash may have taken the last record's line
            assert groups >= len(self.content) - 1, f"{name}: the writer lost {len(self.content) - groups} groups"
            assert set(self.positions[:groups]) <= done <= self.done, f"{name}: the writer lost records"


def check_message(name: str, message: str) -> None:
    assert len(message) < LONGEST_MESSAGE, name
    for pattern in (PLACE, LINE, REMEDY):
        assert pattern.search(message), f"{name}: {message}"


def read_all(directory: Path) -> list[bytes]:
    reader = BankReader(directory)
    return [fingerprint(reader.read(entry), entry) for entry in reader.entries(0, reader.refresh())]


def fingerprint(group, entry) -> bytes:
    """All data that is trained on, of the line and of the blob."""
    prompt = group.prompt
    parts = [prompt.token_ids, group.rewards, group.reward_failed, entry.rewards, entry.reward_failed, entry.truncated]
    parts += [entry.response_lengths]
    parts += [getattr(r, f.name) for r in group.rollouts for f in dataclasses.fields(r)]
    said = (prompt.position, prompt.row, prompt.text, prompt.answer, group.temperature, entry.temperature, entry.topk)
    said += (entry.min_version, entry.max_version, entry.version_sum, entry.finish_reasons, entry.number)
    return repr(said).encode() + b"".join(p.tobytes() if isinstance(p, np.ndarray) else repr(p).encode() for p in parts)


@pytest.fixture(scope="module", params=["closed", "killed"])
def bank(request) -> Iterator[Bank]:
    with TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as directory:
        yield from _bank(Path(directory) / "bank", closed=request.param == "closed")


def _bank(directory: Path, *, closed: bool) -> Iterator[Bank]:
    with BankWriter(directory, PER_SEGMENT, fsync=False) as writer:
        for position in range(SEGMENTS * PER_SEGMENT):
            writer.append(make_group(position, samples=2, topk=2, experts=8))
            if position % 2:
                writer.drop(100 + position, 1, "no_signal", "all rewards are 1")
        done = set(writer.done_positions())
    if not closed:
        head = json.loads((directory / "head.json").read_text())
        (directory / "head.json").write_text(json.dumps({"format": head["format"], "segment": head["segment"]}))
    files = {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "writer.lock"}
    reader = BankReader(directory)
    positions = [entry.position for entry in reader.entries(0, reader.refresh())]
    yield Bank(directory, files, read_all(directory), positions, done, closed)
    assert files == {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "writer.lock"}


def indexes(bank: Bank) -> list[str]:
    return sorted(name for name in bank.files if name.endswith(".jsonl"))


def lines_of(content: bytes) -> list[bytes]:
    return [line + b"\n" for line in content.split(b"\n")[:-1]]


def test_nothing_is_refused_where_nothing_is_damaged(bank):
    bank.attack("undamaged", bank.files)
    assert len(bank.content) == SEGMENTS * PER_SEGMENT


@pytest.mark.slow
def test_every_byte_of_an_index_flipped(bank):
    rng = generator("bank", "index")
    rounds = max(1, CASES // 500)
    names = ["head.json", *indexes(bank)] if bank.closed else ["head.json", indexes(bank)[-1]]
    for name in names:
        for at, _ in itertools.product(range(len(bank.files[name])), range(rounds)):
            content = bytearray(bank.files[name])
            content[at] ^= rng.randrange(1, 256)
            bank.attack(f"byte {at} of {name} is {content[at]:#x}", {**bank.files, name: bytes(content)})


def test_every_line_dropped_repeated_swapped(bank):
    for name in indexes(bank):
        lines = lines_of(bank.files[name])
        for i, line in enumerate(lines):
            changes = {
                "dropped": lines[:i] + lines[i + 1 :],
                "repeated": [*lines[: i + 1], *lines[i:]],
                "repeated at the end": [*lines, line],
                "last that is left": lines[:i],
                "shortened": [*lines[:i], line[: len(line) // 2], *lines[i + 1 :]],
                "without its newline": [*lines[:i], line[:-1], *lines[i + 1 :]],
            }
            for j in range(i + 1, len(lines)):
                changes[f"swapped with {j}"] = [*lines[:i], lines[j], *lines[i + 1 : j], line, *lines[j + 1 :]]
            for what, changed in changes.items():
                bank.attack(f"line {i} of {name} {what}", {**bank.files, name: b"".join(changed)})


def test_files_deleted_emptied_shortened_exchanged(bank):
    rng = generator("bank", "files")
    names = sorted(bank.files)
    for name in names:
        without = {other: content for other, content in bank.files.items() if other != name}
        if name.endswith(".bin") and name != max(n for n in names if n.endswith(".bin")):
            continue  # old .bin files may be deleted
        bank.attack(f"{name} deleted", without)
    for number in range(SEGMENTS):
        stem = f"segment-{number:06d}"
        left = {name: content for name, content in bank.files.items() if not name.startswith(stem)}
        bank.attack(f"{stem} deleted", left)
    for name in names:
        bank.attack(f"{name} emptied", {**bank.files, name: b""})
        for size in (rng.randrange(len(bank.files[name]) or 1) for _ in range(CASES // 30 + 4)):
            bank.attack(f"{name} shortened to {size}", {**bank.files, name: bank.files[name][:size]})
    for a, b in itertools.combinations(names, 2):
        bank.attack(f"{a} and {b} exchanged", {**bank.files, a: bank.files[b], b: bank.files[a]})
        bank.attack(f"{b} is a copy of {a}", {**bank.files, b: bank.files[a]})


@pytest.mark.slow
def test_bytes_of_blobs_flipped(bank):
    rng = generator("bank", "blobs")
    for _ in range(CASES):
        name = f"segment-{rng.randrange(SEGMENTS):06d}.bin"
        bank.attack(*flip(rng, bank.files, name))


def flip(rng: random.Random, files: Files, name: str) -> tuple[str, Files]:
    content = bytearray(files[name])
    at = rng.randrange(len(content))
    content[at] ^= rng.randrange(1, 256)
    return f"byte {at} of {name} is {content[at]:#x}", {**files, name: bytes(content)}


def drop_lines(rng: random.Random, files: Files, name: str) -> tuple[str, Files]:
    lines = lines_of(files[name])
    keep = [rng.random() < 0.7 for _ in lines]
    return f"lines {[i for i, kept in enumerate(keep) if not kept]} of {name} dropped", {
        **files, name: b"".join(itertools.compress(lines, keep))
    }  # fmt: skip


def move_line(rng: random.Random, files: Files, name: str) -> tuple[str, Files]:
    other = rng.choice(sorted(n for n in files if n.endswith(".jsonl")))
    lines = lines_of(files[name])
    if not lines:
        return "nothing", files
    line = lines.pop(rng.randrange(len(lines)))
    files = {**files, name: b"".join(lines)}
    lines = lines_of(files[other])
    lines.insert(rng.randrange(len(lines) + 1), line)
    return f"a line of {name} moved to {other}", {**files, other: b"".join(lines)}


def add_bytes(rng: random.Random, files: Files, name: str) -> tuple[str, Files]:
    more = rng.randbytes(rng.randrange(1, 50))
    return f"{more!r} added to {name}", {**files, name: files[name] + more}


MUTATIONS: list[Callable[[random.Random, Files, str], tuple[str, Files]]] = [
    flip, drop_lines, move_line, add_bytes
]  # fmt: skip


def test_several_at_once(bank):
    for case in range(CASES):
        rng = generator("bank", "several", case)
        files, names = bank.files, []
        for _ in range(rng.randrange(2, 5)):
            mutate = rng.choice(MUTATIONS)
            index = rng.choice(indexes(bank))
            if files[index]:
                name, files = mutate(rng, files, index)
                names.append(name)
        bank.attack(f"case {case}: {'; '.join(names)}", files)
