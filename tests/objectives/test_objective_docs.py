"""docs/objectives.md holds the table of presets as the code has it."""

from __future__ import annotations

import re
from pathlib import Path

from dppo_megatron.objectives import PRESETS
from dppo_megatron.objectives.listing import markdown_table
from dppo_megatron.objectives.settings import AXES

PAGE = Path(__file__).parents[2] / "docs" / "objectives.md"
BEGIN, END = "<!-- presets -->\n", "\n<!-- end of presets -->"


def test_the_table_of_presets_is_the_codes_own():
    """Mend with: python -m tests.objectives.test_objective_docs"""
    assert PAGE.read_text().split(BEGIN)[1].split(END)[0] == markdown_table()


def test_the_page_says_of_every_preset_when_to_use_it():
    section = PAGE.read_text().split("## Which one\n")[1].split("\n## ")[0]
    assert not [name for name in PRESETS if f"`{name}`" not in section]


def test_every_axis_is_on_the_page():
    text = PAGE.read_text()
    grouped = ("gate_", "ratio_cap_negative", "ratio_floor_negative")  # named together
    named = {word for span in re.findall(r"`([^`\n]+)`", text) for word in re.findall(r"\w+", span)}
    missing = [axis for axis in AXES if axis not in named and not axis.startswith(grouped)]
    assert not missing


if __name__ == "__main__":
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + markdown_table() + END + rest.split(END.lstrip("\n"))[1])
