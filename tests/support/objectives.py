"""Objectives for runs that tests start."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from dppo_megatron.common import heartbeat
from dppo_megatron.objectives import PRESETS, Objective, ObjectiveOutput

_measured: set[bytes] = set()  # tokens that were scored since the last training call


class Fragile(Objective):
    """An objective whose process is killed once, where a step that went too far is scored again on its way back.

    Of rank 1, and as soon as the run whose configuration stands beside `fragile` has a checkpoint.
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
    """Return an objective with which `rank` hangs once it is in `phase`: "stopped" by SIGSTOP, or "busy" in a loop.

    It hangs after its next heartbeat, which names the phase.
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
