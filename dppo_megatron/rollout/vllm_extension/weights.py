"""API-process side of a weight update: check everything, pause, swap, tag, forget cached prefixes, resume."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import get_args

from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.engine.protocol import EngineClient

from ..engine import UpdateMode
from ..manifest import BadWeights, Manifest

log = logging.getLogger(__name__)


class WeightsTorn(RuntimeError):
    """An update failed half-way: the weights are neither the old nor the new ones until one succeeds."""


class WeightUpdater:
    """Swaps the served weights, one update at a time."""

    def __init__(self, engine: EngineClient, model: Path):
        self._engine = engine
        self._model = model
        self._served: Manifest | None = None
        self._initialised = False
        self._lock = asyncio.Lock()
        self._torn: str | None = None

    def check_whole(self) -> None:
        """Raises WeightsTorn after a failed update."""
        if self._torn:
            raise WeightsTorn(f"the weights are incomplete, load them again: {self._torn}")

    async def load(self, path: Path, version: int, mode: UpdateMode, wait_s: float) -> float:
        """Serve `path` as policy `version`; returns the seconds generation stood still.

        Raises BadWeights before anything is touched, TimeoutError when running requests do not end within `wait_s`
        (mode wait; the old weights go on), and WeightsTorn when loading itself fails.
        """
        if mode not in get_args(UpdateMode):
            raise BadWeights(f"mode = {mode!r}: must be one of {get_args(UpdateMode)}")
        async with self._lock:
            manifest = await asyncio.to_thread(self._check, path)
            try:
                await asyncio.wait_for(self._engine.pause_generation(mode=mode, clear_cache=False), wait_s)
            except TimeoutError:
                await self._engine.resume_generation()
                raise
            paused = time.perf_counter()
            try:
                await self._swap(manifest, version, mode)
            except Exception as error:
                self._torn = f"{path}: {error}"
                log.exception("weight update from %s failed half-way", path)
                # Requests that were kept must not go on under such weights.
                await self._engine.pause_generation(mode="abort")
                raise WeightsTorn(self._torn) from error
            finally:
                await self._engine.resume_generation()
            self._torn = None
            return time.perf_counter() - paused

    def _check(self, path: Path) -> Manifest:
        if self._served is None:
            try:
                self._served = Manifest.read(self._model)
            except BadWeights as error:
                raise BadWeights(f"cannot tell what the served model looks like: {error}") from error
        manifest = Manifest.read(path)
        manifest.check_replaces(self._served)
        return manifest

    async def _swap(self, manifest: Manifest, version: int, mode: UpdateMode) -> None:
        engine = self._engine
        if not self._initialised:
            await engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
            self._initialised = True
        await engine.start_weight_update()
        files = [str(file) for file in manifest.files]
        await engine.update_weights(WeightTransferUpdateRequest(update_info={"files": files}))
        await engine.finish_weight_update(str(version))
        # Kept requests hold cached keys and values of the old weights: they are preempted and prefilled anew, so each
        # further token is drawn from exactly the policy it is tagged with.
        if not await engine.reset_prefix_cache(reset_running_requests=mode == "keep"):
            raise RuntimeError("the prefix cache still holds keys and values of the old weights")
