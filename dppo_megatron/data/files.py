"""Read rows from JSON lines, parquet files and Hugging Face dataset directories."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dppo_megatron.common.files import LFS_PROBLEM, is_lfs_pointer, read_foreign_json
from dppo_megatron.common.worker import WorkerError
from dppo_megatron.errors import bounded

from .rows import PromptFileError, memory_for_rows, numbered_lines, parse_line
from .worker import WAIT_S, Tables, borrowed

_TABLES = (".parquet", ".arrow")
_FORMATS = {  # file beginning -> (content, needed suffix or "" if compressed)
    b"{": ("JSON", ".jsonl"), b"[": ("JSON", ".jsonl"), b"PAR1": ("parquet", ".parquet"), b"ARROW": ("Arrow", ".arrow"),
    b"\x1f\x8b": ("gzip", ""), b"\x28\xb5\x2f\xfd": ("zstd", ""), b"BZh": ("bzip2", ""), b"\xfd7zXZ": ("xz", ""),
    b"\x04\x22\x4d\x18": ("lz4", ""), b"PK\x03\x04": ("zip", ""),
}  # fmt: skip
_SECONDS, _BYTES_PER_S = 3.0, 20e6  # time limit for computing the next rows; grows with the file
_SPLIT = re.compile(r"(train|test|validation|valid|val|dev|eval)(?![a-z])", re.IGNORECASE)


def unit(path: Path) -> str:
    """Return the unit of a file: `line`, or `row` for a table."""
    files = data_files(path)
    return "row" if files[0].suffix in _TABLES else "line"


def data_files(path: Path) -> list[Path]:
    """Return the files for a path: the path itself, pattern matches (`MATH/*/train-*.parquet`), or a dataset's files.

    Raises `PromptFileError` if there are no files, or files from several splits.
    """
    if path.is_dir():
        return _dataset_files(path)
    if "*" in str(path) and not path.exists():
        starred = next(i for i, part in enumerate(path.parts) if "*" in part)
        if matches := sorted(Path(*path.parts[:starred]).glob("/".join(path.parts[starred:]))):
            return matches
        raise PromptFileError(path, problem="no file matches this pattern; correct it")
    return [path]


def read_rows(path: Path, *, in_memory: bool = False) -> Iterator[tuple[int, dict[str, Any] | ValueError]]:
    """Yield (number from 1, columns) for every row; for a malformed line, an error replaces the columns.

    in_memory: whether the caller stores all rows, so that they must fit into memory.
    Raises `PromptFileError` for a file with another format than its suffix.
    """
    first = 1
    for file in data_files(path):
        if file.exists() and not file.is_file():
            raise PromptFileError(file, problem="cannot read the prompt file: a device or a pipe; name a regular file")
        if file.exists() and (problem := LFS_PROBLEM if is_lfs_pointer(file) else _misnamed(file)):
            raise PromptFileError(file, problem=problem)
        if file.suffix in (".csv", ".tsv"):
            remedy = "pyarrow.parquet.write_table(pyarrow.csv.read_csv(IN), OUT)"
            raise PromptFileError(file, problem=f"only JSONL and parquet are read: {remedy}")
        number = first - 1
        for number, columns in _table(file, first, in_memory) if file.suffix in _TABLES else _json_lines(file, first):
            yield number, columns
        first = number + 1


def _json_lines(file: Path, first: int) -> Iterator[tuple[int, dict[str, Any] | ValueError]]:
    lines = list(numbered_lines(file))
    if file.suffix == ".json" and len(lines) > 1:  # one object over several lines, or one per line
        with contextlib.suppress(ValueError):
            lines = [(1, json.dumps(parse_line(b"\n".join(line for _, line in lines))).encode())]
    for number, line in lines:
        try:
            yield number + first - 1, parse_line(line)
        except ValueError as error:
            yield number + first - 1, error


def _table(file: Path, number: int, in_memory: bool) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield a table's rows; read further rows while the caller processes the current rows."""
    try:
        import pyarrow

        memory = memory_for_rows()
        seconds = _SECONDS + file.stat().st_size / _BYTES_PER_S
        with ThreadPoolExecutor(1) as thread, borrowed(Tables, max(memory, 1 << 30)) as worker:
            future = thread.submit(
                worker.ask, (file, seconds, memory if in_memory else None), WAIT_S, "for rows", list[Any] | bytes
            )
            while parts := future.result():
                if isinstance(parts, list):
                    raise ValueError(parts[0])
                future = thread.submit(worker.ask, (None, seconds, None), WAIT_S, "for rows", list[Any] | bytes)
                rows = pyarrow.ipc.open_stream(parts).read_next_batch().to_pylist(maps_as_pydicts="strict")
                yield from enumerate(rows, number)
                number += len(rows)
    except ImportError:
        raise PromptFileError(file, problem="needs pyarrow: pip install pyarrow") from None
    except (OSError, ValueError, WorkerError) as error:
        problem = bounded(getattr(error, "strerror", None) or str(error), 1000).rstrip(".")
        remedy = "" if ";" in problem else "; it may be damaged, write it again"
        raise PromptFileError(file, problem=f"cannot read the table: {problem}{remedy}") from None


def _misnamed(file: Path) -> str | None:
    """Return the problem if a file's content does not match the suffix, else None."""
    with file.open("rb") as opened:
        head = opened.read(64).lstrip()
    for start, (content, suffix) in _FORMATS.items():
        if head.startswith(start) and file.suffix != suffix and (suffix != ".jsonl" or file.suffix in _TABLES):
            remedy = f"rename it to {suffix}" if suffix else "unpack it, and name the result"
            return f"its content is {content}; {remedy}"
    return None


def _dataset_files(directory: Path) -> list[Path]:
    if (directory / "dataset_dict.json").exists():
        parts = ", ".join(sorted(str(path.parent) for path in directory.glob("*/state.json")))
        raise PromptFileError(
            directory, problem=f"a dataset of several splits; name one of {parts or 'its directories'}"
        )
    if (state := directory / "state.json").exists():  # written by datasets' save_to_disk
        try:
            saved = read_foreign_json(state)
            files = [directory / Path(entry["filename"]).name for entry in saved["_data_files"]]
        except (ValueError, KeyError, TypeError, OSError):
            raise PromptFileError(state, problem="not a file of `datasets`; save the dataset again") from None
        if saved.get("_indices_data_files") or not files:
            raise PromptFileError(
                directory, problem="contains only indices into another dataset; save flatten_indices() of it"
            )
        return files
    below = [(path, str(path.relative_to(directory))) for path in sorted(directory.rglob("*"))]
    files = [path for path, name in below if path.suffix in (*_TABLES, ".jsonl") and "/." not in f"/{name}"]
    if not files:
        raise PromptFileError(directory, problem="has no parquet, arrow or jsonl file; unpack compressed files")
    splits = {m[1].lower() for f in files if (m := _SPLIT.search(str(f.relative_to(directory))))}
    groups = {(f.parent, f.suffix) for f in files}
    if len(splits) > 1 or len(groups) > 1:
        shown = ", ".join(sorted({str(f.parent / re.sub(r"-\d+-of-\d+", "-*", f.name)) for f in files})[:10])
        raise PromptFileError(directory, problem=f"has several sets; name one of {shown}, or several by *")
    return files
