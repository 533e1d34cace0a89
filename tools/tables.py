"""Generate documentation: `python tools/tables.py` writes docs/settings.md and tables of objectives.md and tested.md.

Settings and presets come from the code, layouts from tests/parallel/cases.py, and GPU results from benchmarks/results.
`make docs-check` fails if a page is out of date.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dppo_megatron.config.schema import Config
from dppo_megatron.objectives.describe import additions, axes
from dppo_megatron.objectives.presets import PRESETS

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT), str(ROOT / "benchmarks")]  # tests.parallel and gpu_day
LARGE = 65536  # larger limits only catch typing errors and are not printed
HEAD = """\
# All settings

`python tools/tables.py` writes this page from the config's schema. A config file has a mapping for each section;
`--set section.setting=value` changes one setting, with the value in YAML. `null` means that the value follows from
other settings or from the machine, see the description. N counts the entries of a list, NAME is any name.
`dppo-megatron validate CONFIG` checks all settings; `dppo-megatron objectives NAME` lists those of a method.
"""
TYPES = {"integer": "integer", "number": "number", "string": "text", "boolean": "true, false", "object": "mapping"}


def settings_page() -> str:
    schema = Config.model_json_schema()
    sections = [(name, _resolved(part, schema)) for name, part in schema["properties"].items()]
    parts = [HEAD, " | ".join(f"[{name}](#{name})" for name, _ in sections) + "\n"]
    for name, section in sections:
        parts += [f"## {name}\n", "| setting | type | default | |\n|---|---|---|---|"]
        parts.append("\n".join(_rows(name, section, schema)) + "\n")
    return "\n".join(parts)


def _rows(prefix: str, section: dict[str, Any], schema: dict[str, Any]) -> Iterator[str]:
    for name, field in section["properties"].items():
        setting, inner, suffix = f"{prefix}.{name}", _resolved(field, schema), ""
        of_names = [inner.get("additionalProperties"), *inner.get("patternProperties", {}).values()]
        if entry := next((one for one in of_names if isinstance(one, dict) and "$ref" in one), None):
            inner, suffix = _resolved(entry, schema), ".NAME"
        elif inner.get("type") == "array" and "$ref" in inner["items"]:
            inner, suffix = _resolved(inner["items"], schema), ".N"
        if "properties" in inner and inner["title"] != "RewardConfig":
            yield from _rows(setting + suffix, inner, schema)
            continue
        required = name in section.get("required", ())
        default = "required" if required else f"`{json.dumps(field.get('default', {}), ensure_ascii=False)}`"
        cells = (f"`{setting}`", _kind(field), default, field.get("description", ""))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _kind(field: dict[str, Any]) -> str:
    """Return the type of a setting in words, with its allowed values or range."""
    if "anyOf" in field:
        return " or ".join(_kind(one) for one in field["anyOf"] if one.get("type") != "null")
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field.get("type") == "array":
        return f"list of {_kind(field['items'])}"
    if "$ref" in field:
        return "as [reward](#reward)"
    name = {"path": "path"}.get(field.get("format", ""), TYPES.get(field.get("type", ""), "any value"))
    bounds = {"minimum": ">=", "ge": ">=", "exclusiveMinimum": ">", "gt": ">"}
    bounds |= {"maximum": "<=", "le": "<=", "exclusiveMaximum": "<", "lt": "<"}
    limits = [f"{sign} {field[key]:g}" for key, sign in bounds.items() if key in field and abs(field[key]) < LARGE]
    return f"{name} {', '.join(limits)}".rstrip()


def _resolved(field: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Return the target of a reference, which may be part of an optional value."""
    for one in (field, *field.get("anyOf", ())):
        if "$ref" in one:
            return schema["$defs"][one["$ref"].rpartition("/")[2]]
    return field


def objectives_table() -> str:
    """Return the table of presets with their axes and the settings of their publication."""
    region = ("divergence", "control", "threshold", "ratio", "further terms")
    head = ("preset", *region, "advantage", "aggregation", "source")
    lines = [head, ("---",) * len(head)]
    for name, p in PRESETS.items():
        cells = axes(p.settings)
        control = cells["control"] + ("" if cells["direction"] in ("-", "sampled") else f", {cells['direction']}")
        control += "" if cells["anchor"] in ("-", "mu") else f", anchor {cells['anchor']}"
        own = (
            cells["divergence"],
            control,
            cells["threshold"],
            cells["ratio"],
            ", ".join(additions(p.settings)) or "-",
        )
        lines.append((f"`{name}`", *own, p.advantage, p.aggregation, p.source))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def layouts_table() -> str:
    """Return the layouts in which tests/parallel/test_parity.py trains each model as one process does."""
    from tests.parallel.cases import CASES

    rows: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for world, cases in CASES.items():
        for case, layout in cases.items():
            rows[case.partition(":")[0]][world].append(layout_in_words(layout, world))
    lines = ["| model of the cases | two processes | four processes |", "|---|---|---|"]
    lines += [f"| {model} | {'; '.join(of[2]) or '-'} | {'; '.join(of[4]) or '-'} |" for model, of in rows.items()]
    return "\n".join(lines)


def layout_in_words(layout: Mapping[str, Any], world: int) -> str:
    """Return a layout in words. Example: {"tensor": 2, "sequence": True} of 4 is "tensor 2, sequence, data 2"."""
    sizes = {name: layout.get(name, 1) for name in ("tensor", "pipeline", "context")}
    sizes["data"] = world // (sizes["tensor"] * sizes["pipeline"] * sizes["context"])
    words = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    for name, value in {**layout, **layout.get("settings", {})}.items():
        if name not in ("settings", *sizes):
            shown = name.replace("_", " ")
            words.append(shown if value is True else f"no {shown}" if value is False else f"{shown} {value}")
    return ", ".join(words)


class Ran(NamedTuple):
    """Contains one part of a GPU result file that was not skipped."""

    part: str
    result: str
    file: str
    device: str


def gpu_results(root: Path) -> Iterator[Ran]:
    """Yield the parts that benchmarks/gpu_day.py ran on GPUs, by the result files."""
    for file in sorted((root / "benchmarks" / "results").glob("*-gpu-day*.txt")):
        text = file.read_text()
        device = re.search(r"^chip 0: ([^,]+)", text, re.MULTILINE)
        for part, result in re.findall(r"^(\w+) +[\d.]+ s  (ok|failed: .*?)  ", text, re.MULTILINE):
            yield Ran(part, result, file.name, device[1] if device else "unknown device")


def gpu_table(root: Path) -> str:
    """Return a row for each part of `make test-gpu`, with its results on GPUs."""
    from gpu_day import PARTS

    ran: dict[str, list[str]] = defaultdict(list)
    for one in gpu_results(root):
        ran[one.part].append(f"{one.result}, {one.device}, [{one.file[:10]}](../benchmarks/results/{one.file})")
    lines = ["| part | test | on GPUs |", "|---|---|---|"]
    lines += [f"| `{part.name}` | {part.what} | {'; '.join(ran[part.name]) or 'not run'} |" for part in PARTS]
    return "\n".join(lines)


def pages(root: Path = ROOT) -> dict[Path, str]:
    """Return the generated content of every file."""
    docs = root / "docs"
    objectives, tested = docs / "objectives.md", docs / "tested.md"
    rows = _with_table(tested.read_text(), "layouts", layouts_table())
    return {
        docs / "settings.md": settings_page(),
        objectives: _with_table(objectives.read_text(), "presets", objectives_table()),
        tested: _with_table(rows, "gpu parts", gpu_table(root)),
    }


def _with_table(text: str, name: str, table: str) -> str:
    """Replace the table between the comments `<!-- NAME -->` and `<!-- end of NAME -->`."""
    begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
    before, _, rest = text.partition(begin)
    return before + begin + table + end + rest.partition(end)[2]


def stale(root: Path = ROOT) -> list[str]:
    return [
        f"{path.relative_to(root)}: out of date; run python tools/tables.py"
        for path, content in pages(root).items()
        if not path.is_file() or path.read_text() != content
    ]


if __name__ == "__main__":
    for path, content in pages().items():
        path.write_text(content)
