"""Shows a run or a bank as one HTML file that needs no server and no network. See docs/view.md."""

from .write import write_view

__all__ = ["write_view"]
