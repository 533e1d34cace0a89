"""Objectives for runs that tests start."""

import os
import signal
from pathlib import Path
from typing import Any

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
