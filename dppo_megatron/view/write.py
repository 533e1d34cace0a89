"""Writes the page as one HTML file. Its data is gzip in base64, so no text of a run can become HTML."""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from dppo_megatron.common.files import output, write_atomic
from dppo_megatron.common.tensors import packed
from dppo_megatron.doctor.tokenizer_file import TokenizerFile
from dppo_megatron.errors import bounded
from dppo_megatron.observability.history import History, labels
from dppo_megatron.observability.names import METRICS
from dppo_megatron.observability.report import summary_rows
from dppo_megatron.observability.run_state import run_state
from dppo_megatron.run_dir import RunDir

from .rows import ROW, answer_rows, training_rows
from .source import Source
from .tokens import ShownTokens, TrainedTokens, chosen_groups, excerpt, excerpts, packed_group, read_groups

STYLES = ("page.css",)
SCRIPTS = ("data.js", "curves.js", "table.js", "tokens.js", "main.js")


def write_view(root: Path, out: Path | None = None, model: Path | None = None, other: Path | None = None) -> Path:
    """Write a run or bank, or two to compare, to `out` and return its path.

    `out` defaults to `view.html` in the directory, or with a second run `other` to `view-with-OTHER.html`. `model` is
    the directory of the tokenizer, by default the run's model.path. Without a tokenizer the page shows token ids. The
    page names unreadable files. Raises `ViewError` for a directory that is neither a run nor a bank.
    """
    sides = [_Side.of(path, model) for path in ([root] if other is None else [root, other])]
    head, table = sides[0].head, sides[0].table
    if other is not None:
        head["title"], sides[1].head["title"] = labels([root, other])
        head["other"] = sides[1].head
        run = [np.full(len(side.table["set"]), i, np.uint8) for i, side in enumerate(sides)]
        table = {"run": np.concatenate(run)} | {k: np.concatenate([side.table[k] for side in sides]) for k in table}
    first = [_blob("head", json.dumps(head).encode()), _blob("table", packed(table))]
    first.append(_blob("excerpts", json.dumps([side.excerpts for side in sides]).encode()))
    first += [_blob(f"{of}curves", packed(side.curves)) for of, side in zip(("", "b-"), sides, strict=False)]
    after = [_blob(of + name, data) for of, side in zip(("", "b-"), sides, strict=False) for name, data in side.blobs]
    out = output(out or root / ("view.html" if other is None else f"view-with-{other.resolve().name}.html"))
    write_atomic(out, _page(" and ".join(side.head["title"] for side in sides), first, after))
    return out


@dataclass
class _Side:
    """Contains one run's data. `excerpts` has [prompt, response of each sample] for groups, and by file for answers."""

    head: dict[str, Any]
    table: dict[str, np.ndarray]
    excerpts: dict[str, Any]
    curves: dict[str, np.ndarray]
    blobs: list[tuple[str, bytes]]

    @classmethod
    def of(cls, root: Path, model: Path | None) -> _Side:
        source = Source.of(root)
        (training, entries), answers = training_rows(source, source.config()), answer_rows(source)
        trained, used = TrainedTokens(source), ShownTokens()
        path = source.history.setting("model.path", str)
        model = model or RunDir(root).model(path) or (Path(path) if path else None)
        vocabulary = None if model is None else TokenizerFile.load(model)
        groups, texts = {}, {}
        for number, group in read_groups(source, entries, chosen_groups(source, entries, trained)):
            groups[number] = packed_group(group, trained, used)
            texts[number] = excerpts(group, vocabulary)
        if groups and vocabulary is None:
            why = f"No tokenizer.json can be read in {model}" if model else "No tokenizer is known"
            source.notes.append(f"{why}: tokens are shown by their ids; --model DIR gives one.")
        blobs = [("texts", json.dumps(used.texts(vocabulary)).encode())]
        blobs += [(f"answers-{i}", json.dumps(records).encode()) for i, records in enumerate(answers.files)]
        blobs += [(f"group-{number}", data) for number, data in groups.items()]
        of_answers = [
            [[excerpt(record["prompt"]), *(excerpt(sample["text"]) for sample in record["samples"])] for record in file]
            for file in answers.files
        ]
        table = _table(training, answers.rows, groups.keys(), trained)
        shown = {"groups": texts, "files": of_answers}
        return cls(_head(source, answers.sets), table, shown, _curves(source.history), blobs)


def _table(
    training: np.ndarray, answers: np.ndarray, detailed: Collection[int], trained: TrainedTokens
) -> dict[str, np.ndarray]:
    rows = np.concatenate([training, answers])
    detail, masked = np.ones(len(rows), np.uint8), np.full(len(rows), np.nan, np.float32)
    detail[: len(training)] = np.isin(training["source"], list(detailed))
    if trained.positions:
        keys = training[["prompt", "sample"]].tolist()
        masked[: len(keys)] = [trained.masked_share(*key) for key in keys]
    return {**{name: np.ascontiguousarray(rows[name]) for name in ROW.names or ()}, "detail": detail, "masked": masked}


def _curves(history: History) -> dict[str, np.ndarray]:
    """Return `steps` int32 [N] and each metric fp32 [N], NaN for a step without it."""
    steps = sorted(history.rows)
    curves = {"steps": np.array(steps, np.int32)}
    for name in sorted(history.names):
        values = [history.rows[step].get(name) for step in steps]
        curves[f"m:{bounded(name)}"] = np.array([np.nan if value is None else value for value in values], np.float32)
    return curves


def _head(source: Source, sets: list[str]) -> dict[str, Any]:
    history = source.history
    recorded, state = history.names, {"state": str(run_state(RunDir(source.root)))} if source.is_run else {}
    return {
        "title": history.label,
        "path": str(source.root.resolve()),
        "summary": state | summary_rows(history) if history.rows else state,
        "metrics": {m.name: [m.unit, m.meaning] for m in METRICS if m.name in recorded},
        "sets": ["training", *sets],
        "notes": source.all_notes(),
        "missing": source.missing,
    }


def _blob(name: str, data: bytes) -> str:
    packed = base64.b64encode(gzip.compress(data, 1, mtime=0)).decode()
    return f'<script type="text/plain" id="blob-{name}">{packed}</script>\n'


def _page(title: str, first: list[str], after: list[str]) -> str:
    """Fill the page's template. The blobs in `after` follow the script, so the table is drawn before they are read."""
    files = resources.files(__package__) / "page"

    def joined(names: tuple[str, ...]) -> Iterator[str]:
        return (files.joinpath(name).read_text() for name in names)

    parts = {
        "TITLE": html.escape(title),
        "STYLE": "".join(joined(STYLES)),
        "FIRST": "".join(first),
        "SCRIPT": "".join(joined(SCRIPTS)),
        "AFTER": "".join(after),
    }
    pieces = files.joinpath("page.html").read_text().split("%%")  # alternately HTML and the name of a part
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))
