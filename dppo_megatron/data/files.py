"""Rows of JSON lines, parquet files and Hugging Face dataset directories, as they lie on disk."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .rows import PromptFileError, numbered_lines, parse_line

_TABLES = (".parquet", ".arrow")
_BATCH = 1024  # rows of a table that are held as Python objects at once
_SPLIT = re.compile(r"(train|test|validation|valid|val|dev|eval)(?![a-z])", re.IGNORECASE)


def unit(path: Path) -> str:
    """What counts the rows of a file: `line`, or `row` of a table."""
    files = data_files(path)
    return "row" if files[0].suffix in _TABLES else "line"


def data_files(path: Path) -> list[Path]:
    """The files that a path stands for: itself, those that it matches (`MATH/*/train-*.parquet`), or a dataset's.

    Raises `PromptFileError` when there are none, or of several splits.
    """
    if path.is_dir():
        return _dataset_files(path)
    if "*" in str(path) and not path.exists():
        starred = next(i for i, part in enumerate(path.parts) if "*" in part)
        if found := sorted(Path(*path.parts[:starred]).glob("/".join(path.parts[starred:]))):
            return found
        raise PromptFileError(path, problem="no file matches it")
    return [path]


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | ValueError]]:
    """(number from 1, columns) of every row; in place of columns what is wrong with a line.

    Raises `PromptFileError` for files that cannot be read as what their names say.
    """
    first = 1
    for file in data_files(path):
        if file.exists() and not file.is_file():
            raise PromptFileError(file, problem="cannot read the prompt file: a device or a pipe, that may not end")
        number = first - 1
        for number, columns in _table(file, first) if file.suffix in _TABLES else _json_lines(file, first):
            yield number, columns
        first = number + 1


def _json_lines(file: Path, first: int) -> Iterator[tuple[int, dict[str, Any] | ValueError]]:
    lines = list(numbered_lines(file))
    if file.suffix == ".json" and len(lines) > 1:  # one object, or one on each line
        with contextlib.suppress(ValueError):
            lines = [(1, json.dumps(parse_line(b"\n".join(line for _, line in lines))).encode())]
    for number, line in lines:
        try:
            yield number + first - 1, parse_line(line)
        except ValueError as error:
            yield number + first - 1, error


def _table(file: Path, first: int) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise PromptFileError(file, problem="needs pyarrow: pip install pyarrow") from None
    number = first
    try:
        if file.suffix == ".parquet":
            with pyarrow.parquet.ParquetFile(file) as table:
                for batch in table.iter_batches(_BATCH):
                    yield from enumerate(batch.to_pylist(), number)
                    number += len(batch)
            return
        with pyarrow.memory_map(str(file)) as source:
            for batch in _arrow_batches(pyarrow, source):
                for start in range(0, len(batch), _BATCH):
                    yield from enumerate(batch.slice(start, _BATCH).to_pylist(), number + start)
                number += len(batch)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        problem = getattr(error, "strerror", None) or str(error)
        raise PromptFileError(file, problem=f"cannot read the table: {problem}") from error


def _arrow_batches(pyarrow: Any, source: Any) -> Iterator[Any]:
    """`datasets` writes streams; others write Arrow files."""
    try:
        reader = pyarrow.ipc.open_stream(source)
    except pyarrow.ArrowInvalid:
        source.seek(0)
        reader = pyarrow.ipc.open_file(source)
        yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
        return
    yield from reader


def _dataset_files(directory: Path) -> list[Path]:
    if (directory / "dataset_dict.json").exists():
        splits = ", ".join(sorted(str(path.parent) for path in directory.glob("*/state.json")))
        raise PromptFileError(
            directory, problem=f"a dataset of several splits; name one of {splits or 'its directories'}"
        )
    if (state := directory / "state.json").exists():  # of datasets' save_to_disk
        try:
            saved = json.loads(state.read_bytes())
            files = [directory / Path(entry["filename"]).name for entry in saved["_data_files"]]
        except (ValueError, KeyError, TypeError, OSError):
            raise PromptFileError(state, problem="is not what `datasets` writes") from None
        if saved.get("_indices_data_files") or not files:
            raise PromptFileError(
                directory, problem="a dataset without rows of its own; save it with flatten_indices()"
            )
        return files
    for suffix in ("*.parquet", "*.arrow", "*.jsonl"):
        if files := sorted(directory.rglob(suffix)):
            break
    else:
        raise PromptFileError(directory, problem="holds no parquet, arrow or jsonl file")
    splits = {m[1].lower() for f in files if (m := _SPLIT.search(str(f.relative_to(directory))))}
    groups = {f.parent for f in files}
    if len(splits) > 1 or len(groups) > 1:
        shown = ", ".join(sorted({str(f.parent / re.sub(r"-\d+-of-\d+", "-*", f.name)) for f in files})[:10])
        raise PromptFileError(directory, problem=f"holds several sets; name one of {shown}, or several by *")
    return files
