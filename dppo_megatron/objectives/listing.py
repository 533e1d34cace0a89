"""Show the presets as text: as a table of axes, or a single preset in words."""

from __future__ import annotations

from .describe import additions, axes
from .objective import build_objective
from .presets import PRESETS
from .settings import AXES, AXIS_ALIASES

_LEGEND = """\
mu: the policy of the rollout engine; pi: the policy in training. A threshold is a probability for tv, nats for kl,
the distance of r from 1 for ratio. Any axis can be overridden under objective.settings; `dppo-megatron objectives NAME`
describes a preset in words and lists its settings."""


def table() -> str:
    """Return a table with a line of axes per preset, followed by the presets' other parts and a legend."""
    rows = {name: axes(preset.settings) for name, preset in PRESETS.items()}
    columns = {"name": list(rows)}
    for axis in next(iter(rows.values())):
        columns[axis] = [row[axis] for row in rows.values()]
    widths = {head: max(map(len, [head, *cells])) for head, cells in columns.items()}
    lines = [columns.keys(), *zip(*columns.values(), strict=True)]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths.values(), strict=True)) for line in lines]
    extra_lines = [f"  {name}: {', '.join(words)}" for name, p in PRESETS.items() if (words := additions(p.settings))]
    return "\n".join([*(line.rstrip() for line in shown), "", "in addition", *extra_lines, "", _LEGEND])


def in_words(name: str) -> str:
    """Describe a preset, or a user's objective by dotted path, in words, with source and settings.

    Raises ObjectiveError for an unknown name, with the nearest known name.
    """
    objective = build_objective(name)
    lines = [objective.describe()]
    if preset := PRESETS.get(name):
        lines += [
            "",
            f"  in short: {preset.summary}",
            f"  source: {preset.source}",
            f"  run there with: objective.advantage {preset.advantage}, objective.aggregation {preset.aggregation}",
        ]
    width = max(map(len, AXES))
    lines += ["", "objective.settings (default of the family where marked *)"]
    for axis, field in AXES.items():
        value = getattr(objective.settings, axis)
        mark = "*" if value == field.default else " "
        lines.append(f"  {axis:<{width}} {mark} {value!s:<12} {field.metadata['doc']}")
    also = [f"{alias} (sets {' and '.join(axes)})" for alias, axes in AXIS_ALIASES.items()]
    for axis, field in AXES.items():
        also += [f"{axis}: {value} (= {main_name})" for value, main_name in field.metadata.get("aliases", {}).items()]
    lines += ["", f"also accepted: {', '.join(also)}"]
    return "\n".join(lines)
