"""Draw a figure twice: NAME.png for light pages, and NAME-dark.png, which the documentation site shows on dark ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

LIGHT, DARK = ("#FFFFFF", "#000000", "#EEEEEE"), ("#1E2129", "#D8DBE2", "#3A3F4B")  # paper, ink, grid


def save_both(draw: Callable[[], Figure], output: Path, dpi: int) -> Path:
    """Save both figures. `draw` takes the colours of text and paper from `ink` and `paper`."""
    for ending, (of_paper, of_ink, of_grid) in {"": LIGHT, "-dark": DARK}.items():
        style = dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), of_paper)
        style |= dict.fromkeys(
            ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), of_ink
        )
        with matplotlib.rc_context(style | {"grid.color": of_grid}):
            draw().savefig(output.with_stem(output.stem + ending), dpi=dpi)
    return output


def ink() -> str:
    return str(matplotlib.rcParams["text.color"])


def paper() -> str:
    return str(matplotlib.rcParams["figure.facecolor"])
