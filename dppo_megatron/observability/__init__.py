"""Records of a run: metric names, trackers, console progress, logs and the report."""

from .console import ProgressView
from .logs import last_lines, setup_logging
from .tail import JsonlFollower, read_records
from .trackers import METRICS_FILE, Tracker, Trackers, build_trackers

__all__ = [
    "METRICS_FILE",
    "JsonlFollower",
    "ProgressView",
    "Tracker",
    "Trackers",
    "build_trackers",
    "last_lines",
    "read_records",
    "setup_logging",
]
