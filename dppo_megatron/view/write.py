"""Everything in one HTML file. Data stands in it as base64 of gzip, so no text of a run can be taken for HTML."""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Collection, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from dppo_megatron.common.files import write_atomic
from dppo_megatron.common.tensors import packed
from dppo_megatron.doctor.vocabulary import Vocabulary
from dppo_megatron.observability.history import History
from dppo_megatron.observability.names import METRICS
from dppo_megatron.observability.summary import summary_rows

from .rows import COLUMNS, Answers, Columns, Training, answer_rows, training_rows
from .source import Source
from .tokens import Used, chosen_groups, packed_groups
from .trained import TrainedTokens

STYLES = ("page.css",)
SCRIPTS = ("data.js", "curves.js", "table.js", "tokens.js", "main.js")


def write_view(root: Path, out: Path | None = None, model: Path | None = None) -> Path:
    """Writes what is in a run or bank to `out`, by default `view.html` in the directory; returns its path.

    model: directory of the tokenizer; default: the run's model.path. Without one, tokens are shown by their ids.
    What cannot be read is said on the page. Raises `ViewError` for a directory that is neither run nor bank.
    """
    source = Source.of(root)
    training, answers = training_rows(source, source.config()), answer_rows(source)
    trained = TrainedTokens(source)
    chosen = chosen_groups(source, training.entries, trained)
    used = Used()
    read = packed_groups(source, training.entries, chosen, trained, used)
    groups = {number: _blob(f"group-{number}", data) for number, data in read}
    model = model or (Path(path) if (path := source.history.setting("model.path", str)) else None)
    vocabulary = None if model is None else Vocabulary.load(model)
    if groups and vocabulary is None:
        why = f"No tokenizer.json can be read in {model}" if model else "No tokenizer is known"
        source.notes.append(f"{why}: tokens are shown by their ids; --model DIR gives one.")
    texts = used.texts(vocabulary)
    blobs = [_blob("table", packed(_table(training, answers, groups.keys(), trained)))]
    blobs.append(_blob("curves", packed(_curves(source.history))))
    after = [_blob("texts", json.dumps(texts).encode())]
    after += [_blob(f"answers-{i}", json.dumps(records).encode()) for i, records in enumerate(answers.files)]
    blobs.insert(0, _blob("head", json.dumps(_head(source, answers)).encode()))
    out = out or root / "view.html"
    write_atomic(out, _page(source.history.label, blobs, [*after, *groups.values()]))
    return out


def _table(training: Training, answers: Answers, detailed: Collection[int], trained: TrainedTokens) -> Columns:
    columns = {name: np.concatenate([training.columns[name], answers.columns[name]]) for name in COLUMNS}
    has_tokens = np.zeros(len(training.entries), np.uint8)
    has_tokens[list(detailed)] = 1
    rows = [has_tokens[training.columns["source"]], np.ones(len(answers.columns["set"]), np.uint8)]
    masked = np.full(len(columns["set"]), np.nan, np.float32)
    if trained.positions:
        keys = zip(training.columns["prompt"].tolist(), training.columns["sample"].tolist(), strict=True)
        masked[: len(training.columns["set"])] = [trained.masked_share(*key) for key in keys]
    return {**columns, "detail": np.concatenate(rows), "masked": masked}


def _curves(history: History) -> dict[str, np.ndarray]:
    """`steps` [N] int32 and of every metric fp32 [N], NaN where a step has none."""
    steps = sorted(history.rows)
    names = sorted({name for row in history.rows.values() for name in row})
    found = {name: np.array([_number(history.rows[s].get(name)) for s in steps], np.float32) for name in names}
    return {"steps": np.array(steps, np.int32), **{f"m:{name}": values for name, values in found.items()}}


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _head(source: Source, answers: Answers) -> dict[str, Any]:
    history = source.history
    recorded = {name for row in history.rows.values() for name in row}
    return {
        "title": history.label,
        "path": str(source.root.resolve()),
        "summary": summary_rows(history) if history.rows else {},
        "metrics": {m.name: [m.unit, m.meaning] for m in METRICS if m.name in recorded},
        "sets": ["training", *answers.sets],
        "notes": source.all_notes(),
    }


def _blob(name: str, data: bytes) -> str:
    packed = base64.b64encode(gzip.compress(data, 1, mtime=0)).decode()
    return f'<script type="text/plain" id="blob-{name}">{packed}</script>\n'


def _page(title: str, first: list[str], after: list[str]) -> str:
    """The table is drawn before the browser has read the blobs behind it."""
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
    pieces = files.joinpath("page.html").read_text().split("%%")  # in turn HTML and the name of a part
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))
