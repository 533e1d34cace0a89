"""wandb, online or offline. Anything wandb cannot do is a warning: it never stops or holds up training."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dppo_megatron.common.files import write_atomic

if TYPE_CHECKING:
    from dppo_megatron.config import Config

logger = logging.getLogger(__name__)

ID_FILE = "wandb_id"
CONNECT_TIMEOUT_S = 30.0
FINISH_TIMEOUT_S = 120.0


class WandbTracker:
    """Logs to an open wandb run. Steps are a metric of their own, so evaluations may arrive late.

    wandb cannot rewind a run without its server's help: steps repeated after a resume show both values there;
    metrics.jsonl is the record without repetition.
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
    """Starts the wandb run, or continues the one named in RUN/wandb_id when `resume_step` is given.

    Online without login or network falls back to offline with a warning; None when that fails too.
    """
    import wandb

    logging.getLogger("wandb").propagate = False  # it keeps a log of its own; ours gets one line
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
            logger.warning("wandb %s failed, training goes on: %s", mode, " ".join(str(error).split()))
            with contextlib.suppress(Exception):
                wandb.teardown()  # or the next attempt finds the id in use
            continue
        if mode == "online":
            logger.info("wandb: %s", run.url)
        else:
            logger.info("wandb offline; upload with: wandb sync %s", run.settings.sync_dir)
        return tracker
    return None


def _run_id(run_dir: Path, fresh: bool) -> str:
    path = run_dir / ID_FILE
    if not fresh and path.exists() and (known := path.read_text().strip()):
        return known
    run_id = uuid.uuid4().hex[:12]
    write_atomic(path, run_id + "\n")
    return run_id
