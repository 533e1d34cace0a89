"""docs/objectives.md names every preset and axis; `tools/tables.py` draws its table, and tests/house compares it."""

import re
from pathlib import Path

from dppo_megatron.objectives import PRESETS
from dppo_megatron.objectives.settings import AXES

PAGE = Path(__file__).parents[2] / "docs" / "objectives.md"


def test_the_page_says_of_every_preset_when_to_use_it():
    section = PAGE.read_text().split("## Choosing a method\n")[1].split("\n## ")[0]
    assert not [name for name in PRESETS if f"`{name}`" not in section]


def test_every_axis_is_on_the_page():
    text = PAGE.read_text()
    grouped = ("gate_", "ratio_cap_negative", "ratio_floor_negative")  # named together
    named = {word for span in re.findall(r"`([^`\n]+)`", text) for word in re.findall(r"\w+", span)}
    missing = [axis for axis in AXES if axis not in named and not axis.startswith(grouped)]
    assert not missing
