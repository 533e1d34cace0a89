"""Where metrics go: metrics.jsonl always, TensorBoard and wandb on request. One rank of a run logs."""

from __future__ import annotations

import errno
import importlib.util
import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dppo_megatron.common.files import naming_a_full_disk, write_atomic
from dppo_megatron.errors import MissingPackageError

if TYPE_CHECKING:
    from dppo_megatron.config import Config

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"


class Tracker(Protocol):
    """A destination of metrics. `log` may be called several times for a step, and late for an earlier one."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def build_trackers(config: Config, resume_step: int | None) -> Trackers:
    """Opens what `config.tracking` asks for, in the run directory.

    `resume_step` is the step of the checkpoint the run continues from: later records are removed, for they
    will be written again. None starts afresh; an older metrics.jsonl is kept under another name.
    Raises MissingPackageError when a package is missing.
    """
    from .wandb_tracker import open_wandb

    if missing := missing_packages(config):
        raise MissingPackageError("; ".join(missing))
    run_dir = config.run.dir
    run_dir.mkdir(parents=True, exist_ok=True)
    optional: list[Tracker] = []
    if config.tracking.tensorboard:
        optional.append(TensorBoardTracker(run_dir / "tensorboard", resume_step))
    if config.tracking.wandb != "off" and (wandb_tracker := open_wandb(config, resume_step)):
        optional.append(wandb_tracker)
    return Trackers(JsonlTracker(run_dir / METRICS_FILE, resume_step), optional)


def missing_packages(config: Config) -> list[str]:
    """Return a line for each tracker of `config.tracking` whose package is not installed."""
    asked = {"tensorboard": config.tracking.tensorboard, "wandb": config.tracking.wandb}
    return [
        f"tracking.{name} = {str(value).lower()}: its package is not installed; pip install {name}, or set it to "
        f"{'false' if value is True else 'off'}"
        for name, value in asked.items()
        if value not in (False, "off") and importlib.util.find_spec(name) is None
    ]


class Trackers:
    """Passes metrics to a required tracker, whose errors raise, and to optional ones, dropped on an error.

    A context manager: leaving it closes all of them.
    """

    def __init__(self, required: Tracker, optional: Sequence[Tracker] = ()):
        self._required = required
        self._optional = list(optional)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        plain = {name: float(value) for name, value in metrics.items()}
        self._required.log(step, plain)
        for tracker in tuple(self._optional):
            try:
                tracker.log(step, plain)
            except Exception as error:
                self._optional.remove(tracker)
                name = type(tracker).__name__
                logger.warning("%s stopped at step %d, training goes on: %s", name, step, error)

    def close(self) -> None:
        self._required.close()
        for tracker in self._optional:
            try:
                tracker.close()
            except Exception as error:
                logger.warning("%s did not close cleanly: %s", type(tracker).__name__, error)
        self._optional.clear()

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class JsonlFile:
    """Records with a `step`, one a line. On resume those after `resume_step` go; without, an older file is set aside.

    A line reaches the operating system whole or is taken back, so a killed trainer loses nothing it logged.
    """

    def __init__(self, path: Path, resume_step: int | None = None):
        if path.exists():
            if resume_step is None:
                _set_aside(path)
            else:
                _remove_after(path, resume_step)
        self._path = path
        self._fd: int | None = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def append(self, record: Mapping[str, Any]) -> None:
        """Raises ValueError once closed, OSError when there is no room; the file is then as before."""
        if self._fd is None:
            raise ValueError("this tracker is closed")
        size = os.fstat(self._fd).st_size
        data = (json.dumps(record) + "\n").encode()
        try:
            with naming_a_full_disk(self._path, len(data)):
                if os.write(self._fd, data) != len(data):
                    raise OSError(errno.ENOSPC, f"no room for the record of step {record['step']}")
        except OSError:
            os.ftruncate(self._fd, size)  # half a line would swallow the next one
            raise

    def close(self) -> None:
        if self._fd is not None:
            os.fsync(self._fd)
            os.close(self._fd)
            self._fd = None


class JsonlTracker(JsonlFile):
    """Appends one line per call, `{"step": ..., "time": ..., name: value, ...}`; not finite becomes null."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self.append({"step": int(step), "time": round(time.time(), 3), **values})


class TensorBoardTracker:
    """Event files in `directory`; on resume TensorBoard drops what earlier ones hold after `resume_step`."""

    def __init__(self, directory: Path, resume_step: int | None = None):
        from torch.utils.tensorboard import SummaryWriter

        first = 0 if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(directory), purge_step=first, flush_secs=10)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


def _set_aside(path: Path) -> None:
    """Renames metrics.jsonl of an earlier run to metrics.1.jsonl, .2, ...: nothing is lost, nothing mixed."""
    number = 1
    while (target := path.with_suffix(f".{number}{path.suffix}")).exists():
        number += 1
    path.rename(target)
    logger.warning("%s belonged to an earlier run; kept as %s", path, target.name)


def _remove_after(path: Path, resume_step: int) -> None:
    """Keeps the lines of steps up to `resume_step`; cuts an incomplete last line."""
    data = path.read_bytes()
    complete = data[: data.rfind(b"\n") + 1]
    kept = b"".join(line for line in complete.splitlines(keepends=True) if _step_of(line) <= resume_step)
    if kept == complete:
        if len(complete) < len(data):
            os.truncate(path, len(complete))
        return
    # A new file, not a truncated one: readers notice the replacement however fast it grows again.
    write_atomic(path, kept)


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf  # not a record: goes
