"""Generate documentation from the code: `python tools/tables.py` writes docs/settings.md and a table of objectives.md.

`make docs-check` fails if either is out of date.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dppo_megatron.config.schema import Config
from dppo_megatron.objectives.describe import additions, axes
from dppo_megatron.objectives.presets import PRESETS

ROOT = Path(__file__).parents[1]
LARGE = 65536  # larger limits only catch typing errors and are not printed
BEGIN, END = "<!-- presets -->\n", "\n<!-- end of presets -->"
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


def pages(root: Path = ROOT) -> dict[Path, str]:
    """Return the generated content of every file."""
    page = root / "docs" / "objectives.md"
    before, _, rest = page.read_text().partition(BEGIN)
    return {
        root / "docs" / "settings.md": settings_page(),
        page: before + BEGIN + objectives_table() + END + rest.partition(END)[2],
    }


def stale(root: Path = ROOT) -> list[str]:
    return [
        f"{path.relative_to(root)}: out of date; run python tools/tables.py"
        for path, content in pages(root).items()
        if not path.is_file() or path.read_text() != content
    ]


if __name__ == "__main__":
    for path, content in pages().items():
        path.write_text(content)
