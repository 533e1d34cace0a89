"""Show progress between processes by a file's modification time."""

from __future__ import annotations

import time
from pathlib import Path


def show_progress(path: Path) -> None:
    """Report in `path` that a long piece of work continues; `last_progress` reads it."""
    path.touch()


def last_progress(path: Path) -> str:
    """Describe when the file was last written or touched."""
    try:
        return time.strftime("last record or evaluated prompt at %H:%M:%S", time.localtime(path.stat().st_mtime))
    except FileNotFoundError:
        return "nothing recorded or evaluated yet"
