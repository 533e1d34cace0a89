"""Draw the tables of docs/paths.md: path_logprob.svg, path_weight.svg and path_setting.svg.

    python docs/draw_paths.py

Each process is a column, and each step a box in it with the bold words of the table.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

HERE = Path(__file__).parent
COLUMN, ROW, TOP, WIDTH, HEIGHT = 180, 46, 52, 150, 30  # pixels; WIDTH and HEIGHT are of a box
STYLE = """  <style>
    .box { fill: #f6f8fa; stroke: #8c959f; }
    .text, .name { fill: #1f2328; }
    .line { stroke: #0072b2; }
    .tip { fill: #0072b2; }
    .lane { stroke: #d0d7de; }
    @media (prefers-color-scheme: dark) {
      .box { fill: #161b22; stroke: #6e7681; }
      .text, .name { fill: #e6edf3; }
      .line { stroke: #56b4e9; }
      .tip { fill: #56b4e9; }
      .lane { stroke: #30363d; }
    }
  </style>
  <defs>
    <marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">
      <path class="tip" d="M0 0 L10 5 L0 10 z"/>
    </marker>
  </defs>"""


def paths(page: str) -> dict[str, list[tuple[str, str]]]:
    """Return the steps of each picture, (process, name), by the picture's file name."""
    pictures = {}
    for section in page.split("\n## ")[1:]:
        (name,) = re.findall(r"\((path_\w+\.svg)\)", section)
        pictures[name] = re.findall(r"^\| ([^|]+) \| \*\*([^*]+)\*\*", section, re.MULTILINE)
    return pictures


def draw(steps: list[tuple[str, str]]) -> str:
    lanes = list(dict.fromkeys(process for process, _ in steps))
    width, height = COLUMN * len(lanes), TOP + ROW * len(steps)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="Steps by process" font-family="system-ui, sans-serif" font-size="14" text-anchor="middle">',
        STYLE,
    ]
    for number, lane in enumerate(lanes):
        x = COLUMN * number + COLUMN // 2
        parts.append(f'  <text class="name" font-weight="600" x="{x}" y="24">{lane}</text>')
        parts.append(f'  <line class="lane" x1="{x}" x2="{x}" y1="36" y2="{height - 8}"/>')
    places = [(COLUMN * lanes.index(lane) + COLUMN // 2, TOP + ROW * i) for i, (lane, _) in enumerate(steps)]
    for (x, y), (next_x, next_y) in itertools.pairwise(places):
        side = (next_x > x) - (next_x < x)
        start_x, start_y = (x + side * WIDTH // 2, y + HEIGHT // 2) if side else (x, y + HEIGHT)
        bend = f"H{next_x} V{next_y}" if side else f"V{next_y}"
        line = f'class="line" fill="none" stroke-width="1.5" marker-end="url(#tip)" d="M{start_x} {start_y} {bend}"'
        parts.append(f"  <path {line}/>")
    for (x, y), (_, name) in zip(places, steps, strict=True):
        parts.append(f'  <rect class="box" x="{x - WIDTH // 2}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>')
        parts.append(f'  <text class="text" x="{x}" y="{y + 20}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    for name, steps in paths((HERE / "paths.md").read_text()).items():
        (HERE / name).write_text(draw(steps))


if __name__ == "__main__":
    main()
