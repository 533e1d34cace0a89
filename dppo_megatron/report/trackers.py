"""Writes metrics to metrics.jsonl and, on request, to TensorBoard and wandb. Only one rank logs."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from dppo_megatron.common.files import write_atomic
from dppo_megatron.errors import MissingPackageError
from dppo_megatron.run_dir import RunDir

from .tail import JsonlFile

if TYPE_CHECKING:
    from dppo_megatron.config import Config
    from dppo_megatron.config.schema import TrackingConfig

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 30.0
FINISH_TIMEOUT_S = 120.0


class Tracker(Protocol):
    """Receives metrics. `log` may be called several times for a step, and later for an earlier step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def build_trackers(config: Config, resume_step: int | None) -> Trackers:
    """Open the trackers that `config.tracking` selects, in the run directory.

    `resume_step` is the checkpoint step from which the run continues. Later records are removed, because the run writes
    them again. None starts a new file and renames an older metrics.jsonl. Raises MissingPackageError.
    """
    if missing := missing_packages(config.tracking):
        raise MissingPackageError("; ".join(missing))
    run_dir = config.run.dir
    run_dir.mkdir(parents=True, exist_ok=True)
    optional: list[Tracker] = []
    if config.tracking.tensorboard:
        optional.append(TensorBoardTracker(run_dir / "tensorboard", resume_step))
    if config.tracking.wandb != "off" and (wandb_tracker := open_wandb(config, resume_step)):
        optional.append(wandb_tracker)
    return Trackers(JsonlTracker(RunDir(run_dir).metrics, resume_step), optional)


def missing_packages(tracking: TrackingConfig) -> list[str]:
    """Return a message for each enabled tracker in `tracking` that lacks a package."""
    settings = {"tensorboard": tracking.tensorboard, "wandb": tracking.wandb}
    return [
        f"tracking.{name} = {str(value).lower()}: its package is not installed; pip install {name}, or set it to "
        f"{'false' if value is True else 'off'}"
        for name, value in settings.items()
        if value not in (False, "off") and importlib.util.find_spec(name) is None
    ]


class Trackers:
    """Passes metrics to trackers. The required tracker raises errors; an optional tracker is removed after an error."""

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
                logger.warning("%s stopped at step %d, training continues: %s", name, step, error)

    def close(self) -> None:
        self._required.close()
        for tracker in self._optional:
            try:
                tracker.close()
            except Exception as error:
                logger.warning("%s did not close cleanly: %s", type(tracker).__name__, error)
        self._optional.clear()


class JsonlTracker(JsonlFile):
    """Appends `{"step": ..., "time": ..., name: value, ...}` per call. A value that is not finite becomes null."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self.append({"step": int(step), "time": round(time.time(), 3), **values})


class TensorBoardTracker:
    """Writes event files to `directory`. After a resume, TensorBoard ignores old events after step `resume_step`."""

    def __init__(self, directory: Path, resume_step: int | None = None):
        from torch.utils.tensorboard import SummaryWriter

        first = 0 if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(directory), purge_step=first, flush_secs=10)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """Logs to an open wandb run. A wandb error becomes a warning and never stops or delays training.

    The step is a metric, so evaluations may arrive late. wandb cannot rewind a run without the server, so a step that a
    resume repeats has both values in wandb. metrics.jsonl has each step once.
    """

    def __init__(self, run: Any):
        self._run = run
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


def open_wandb(config: Config, resume_step: int | None) -> WandbTracker | None:
    """Start a wandb run, or continue the run named in RUN/wandb_id if `resume_step` is given.

    Without a login or a network, online falls back to offline with a warning. Returns None if offline fails too.
    """
    import wandb

    logging.getLogger("wandb").propagate = False  # wandb writes a separate log; ours gets one line
    run_id = _run_id(config.run.dir, fresh=resume_step is None)
    modes: tuple[Literal["online", "offline"], ...] = ("online", "offline")
    for mode in modes[modes.index(config.tracking.wandb) :]:
        try:
            if mode == "online" and not wandb.login(prompt=False, verify=False):
                raise RuntimeError("not logged in; run `wandb login` or set WANDB_API_KEY")
            run = wandb.init(
                project=config.tracking.wandb_project,
                name=config.tracking.wandb_name or config.run.dir.resolve().name,
                dir=str(config.run.dir),
                id=run_id,
                config=config.model_dump(mode="json"),
                mode=mode,
                resume="allow" if mode == "online" else None,
                settings=wandb.Settings(
                    console="off",  # our logs are files already
                    silent=True,
                    init_timeout=CONNECT_TIMEOUT_S,
                    finish_timeout=FINISH_TIMEOUT_S,
                ),
            )
            tracker = WandbTracker(run)
        except Exception as error:
            logger.warning("wandb %s failed, training continues: %s", mode, " ".join(str(error).split()))
            with contextlib.suppress(Exception):
                wandb.teardown()  # otherwise the next attempt finds the id in use
            continue
        if mode == "online":
            logger.info("wandb: %s", run.url)
        else:
            logger.info("wandb offline; upload with: wandb sync %s", run.settings.sync_dir)
        return tracker
    return None


def _run_id(run_dir: Path, fresh: bool) -> str:
    path = run_dir / "wandb_id"
    if not fresh and path.exists() and (stored_id := path.read_text().strip()):
        return stored_id
    run_id = uuid.uuid4().hex[:12]
    write_atomic(path, run_id + "\n")
    return run_id
