"""Writes the page as a single HTML file. The data is gzip in base64, so run texts cannot become HTML."""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from dppo_megatron import __version__
from dppo_megatron.common.files import output, write_atomic
from dppo_megatron.common.tensors import packed
from dppo_megatron.data.tokenizer_file import TokenizerFile
from dppo_megatron.errors import bounded
from dppo_megatron.report.history import History, labels
from dppo_megatron.report.names import METRICS
from dppo_megatron.report.report import objective_settings, summary_rows
from dppo_megatron.report.run_state import run_state
from dppo_megatron.run_dir import RunDir

from .rows import ROW, answer_rows, training_rows
from .source import Source, ViewError
from .tokens import ShownTokens, TrainedTokens, chosen_groups, excerpts, packed_group, read_groups, response_texts

SCRIPTS = ("data.js", "curves.js", "table.js", "tokens.js", "main.js")


def write_view(root: Path, out: Path | None = None, model: Path | None = None, others: Sequence[Path] = ()) -> Path:
    """Write a page for a run or bank, or for several to compare, and return the page path.

    `out` defaults to `view.html` in `root`, or with other runs to `view-with-OTHER.html`. `model` is the tokenizer
    directory, by default the run's model.path. Without a tokenizer, the page shows token ids. The page names unreadable
    files. Raises `ViewError` for a directory that is neither a run nor a bank, or is named twice.
    """
    roots = [root, *others]
    if len({path.resolve() for path in roots}) < len(roots):
        raise ViewError(f"OTHER = {others[-1]}: a comparison names the same run twice; name different runs")
    sides = [_Side.open(path, label, model) for path, label in zip(roots, labels(roots), strict=True)]
    head = sides[0].head | {"others": [side.head for side in sides[1:]], "version": __version__}
    table = {k: np.concatenate([side.table[k] for side in sides]) for k in sides[0].table}
    table["run"] = np.repeat(np.arange(len(sides), dtype=np.uint8), [len(side.table["set"]) for side in sides])
    first = [_blob("head", json.dumps(head).encode()), _blob("table", packed(table))]
    first.append(_blob("excerpts", json.dumps([side.excerpts for side in sides]).encode()))
    named = [(f"{i}-" if i else "", side) for i, side in enumerate(sides)]
    first += [_blob(f"{prefix}curves", packed(side.curves)) for prefix, side in named]
    deferred_blobs = [_blob(prefix + name, data) for prefix, side in named for name, data in side.blobs]
    out = output(out or root / ("-with-".join(["view", *(other.resolve().name for other in others)]) + ".html"))
    write_atomic(out, _page(" and ".join(side.head["title"] for side in sides), first, deferred_blobs))
    return out


@dataclass
class _Side:
    """Contains a run's data. `excerpts` has [prompt, *responses] for each group and each prompt of an answer file."""

    head: dict[str, Any]
    table: dict[str, np.ndarray]
    excerpts: dict[str, Any]
    curves: dict[str, np.ndarray]
    blobs: list[tuple[str, bytes]]

    @classmethod
    def open(cls, root: Path, label: str, model: Path | None) -> _Side:
        source = Source.open(root)
        (training, entries), answers = training_rows(source, source.config()), answer_rows(source)
        trained, shown_tokens = TrainedTokens(source), ShownTokens()
        path = source.history.setting("model.path", str)
        model = model or RunDir(root).model(path) or (Path(path) if path else None)
        vocabulary = None if model is None else TokenizerFile.load(model)
        groups, texts = {}, {}
        for number, group in read_groups(source, entries, chosen_groups(source, entries, trained)):
            groups[number] = packed_group(group, trained, shown_tokens)
            texts[number] = excerpts(group.prompt.text, response_texts(group, vocabulary))
        if groups and vocabulary is None:
            reason = f"No tokenizer.json can be read in {model}" if model else "No tokenizer is known"
            source.notes.append(f"{reason}: tokens are shown by their ids; --model DIR gives one.")
        blobs = [("texts", json.dumps(shown_tokens.texts(vocabulary)).encode())]
        blobs += [(f"answers-{i}", json.dumps(records).encode()) for i, records in enumerate(answers.files)]
        blobs += [(f"group-{number}", data) for number, data in groups.items()]
        table = _table(training, answers.rows, groups.keys(), trained)
        answered = [
            [(record["prompt"], [s["text"] for s in record["samples"]]) for record in file] for file in answers.files
        ]
        shown = {"groups": texts, "files": [[excerpts(*texts_of) for texts_of in file] for file in answered]}
        return cls(_head(source, label, answers.sets), table, shown, _curves(source.history), blobs)


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
    """Return `steps` int32 [N] and each metric fp32 [N], with NaN for steps without the metric."""
    steps = sorted(history.rows)
    curves = {"steps": np.array(steps, np.int32)}
    for name in sorted(history.names):
        curves[f"m:{bounded(name)}"] = np.array([history.rows[step].get(name) for step in steps], np.float32)
    return curves


def _head(source: Source, label: str, sets: list[str]) -> dict[str, Any]:
    history = source.history
    settings, times = objective_settings(history), history.times
    recorded = history.names
    state = {"state": str(run_state(RunDir(source.root), history.last_step))} if source.is_run else {}
    return {
        "title": label,
        "path": str(source.root.resolve()),
        "summary": state | summary_rows(history) if history.rows else state,
        "metrics": {m.name: [m.unit, m.meaning] for m in METRICS if m.name in recorded},
        "sets": ["training", *sets],
        "notes": source.all_notes(),
        "missing": source.missing,
        "delta": settings and (settings.epsilon_high if settings.measures_ratio else settings.delta),
        "times": [min(times), max(times)] if times else [],
    }


def _blob(name: str, data: bytes) -> str:
    packed = base64.b64encode(gzip.compress(data, 1, mtime=0)).decode()
    return f'<script type="text/plain" id="blob-{name}">{packed}</script>\n'


def _page(title: str, first: list[str], deferred_blobs: list[str]) -> str:
    """Fill the page template. `deferred_blobs` follow the script, so the table is drawn before they are read."""
    files = resources.files(__package__) / "page"

    parts = {
        "TITLE": html.escape(title),
        "STYLE": files.joinpath("page.css").read_text(),
        "FIRST": "".join(first),
        "SCRIPT": "".join(files.joinpath(name).read_text() for name in SCRIPTS),
        "AFTER": "".join(deferred_blobs),
    }
    pieces = files.joinpath("page.html").read_text().split("%%")  # alternately HTML and a part's name
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))
