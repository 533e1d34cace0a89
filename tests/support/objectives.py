"""Defines objectives for runs that tests start."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from dppo_megatron.common import heartbeat
from dppo_megatron.objectives import PRESETS, Objective, ObjectiveOutput

_measured: set[bytes] = set()  # tokens that were scored since the last training call


class Fragile(Objective):
    """Kills the process of rank 1 once, when a step that went too far is scored again while it is undone.

    Waits until the run next to the file `fragile` has a checkpoint.
    """

    def __call__(self, **given: Any) -> ObjectiveOutput:
        if given["logprob"].requires_grad:
            _measured.clear()
        else:
            self._measure(given["rollout_logprob"].numpy().tobytes())
        return super().__call__(**given)

    def _measure(self, tokens: bytes) -> None:
        fragile = Path(os.environ.get("FRAGILE", "/nowhere"))
        saved = fragile.parent / "run" / "checkpoints" / "latest"
        if tokens in _measured and os.environ["RANK"] == "1" and fragile.exists() and saved.exists():
            fragile.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        _measured.add(tokens)


fragile = Fragile("fragile", PRESETS["dppo_binary_tv"].settings)


def hanging(phase: str, how: str, rank: int) -> Objective:
    """Return an objective that makes `rank` hang after the heartbeat that names `phase`.

    how: "stopped" by SIGSTOP, or "busy" in a loop.
    """
    moved = heartbeat.moved

    def hang(**now: Any) -> None:
        moved(**now)
        if heartbeat._now["phase"] == phase:
            while how == "busy":
                time.sleep(0.1)
            time.sleep(heartbeat.INTERVAL_S + 1)
            os.kill(os.getpid(), signal.SIGSTOP)

    if os.environ.get("RANK") == str(rank):  # not in the launcher, which checks the setting
        heartbeat.moved = hang
        if phase == "load":
            hang()
    return Objective("hanging", PRESETS["dppo_binary_tv"].settings)
