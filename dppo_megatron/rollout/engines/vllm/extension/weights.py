"""Update weights from the API process: check them, pause, swap, tag, reset the prefix cache, resume."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from vllm.engine.protocol import EngineClient
from vllm.lora.request import LoRARequest

from dppo_megatron.rollout.engines.protocol import UpdateMode
from dppo_megatron.weights.broadcast_plan import WeightGroupPlan
from dppo_megatron.weights.delta import is_delta
from dppo_megatron.weights.manifest import BadWeights, Manifest, UnreadableWeights
from dppo_megatron.weights.process_group import nccl_problem, nccl_settings

from .adapter import adapter_in

log = logging.getLogger(__name__)

READ_POLL_S = 0.01


class WeightsInconsistent(RuntimeError):
    """An update failed half-way: the weights mix the old and the new version until an update succeeds."""


class WeightUpdater:
    """Swaps the served weights, one update at a time."""

    def __init__(self, engine: EngineClient, model: Path, version: int = -1, *, adapters: bool = False):
        self._engine = engine
        self._adapters = adapters  # whether the server loads only adapters
        self._model = model
        self._served: Manifest | None = None
        self._lock = asyncio.Lock()
        self._began: float | None = None  # when the lock was acquired
        self._inconsistent: str | None = None
        self.version = version  # version that the engine serves, or served before the running update
        self.group = ""  # weight group that the workers receive broadcasts from; empty = none
        self.adapter: LoRARequest | None = None  # adapter that requests must name; None if the policy has none

    def check_consistent(self) -> None:
        """Raise WeightsInconsistent after a failed update."""
        if self._inconsistent:
            raise WeightsInconsistent(f"the weights are incomplete, load them again: {self._inconsistent}")

    @property
    def updating_s(self) -> float | None:
        """Return how many seconds ago the running update, join, sleep or wake began, or None if none is running.

        The engine core does not answer during these operations.
        """
        return None if self._began is None else time.monotonic() - self._began

    @asynccontextmanager
    async def _exclusive(self) -> AsyncIterator[None]:
        async with self._lock:
            self._began = time.monotonic()
            try:
                yield
            finally:
                self._began = None

    async def join(self, plan: WeightGroupPlan) -> None:
        """Make the workers leave earlier weight groups and join the trainer's group.

        Raises BadWeights, before any process waits, if the group's tensors do not match the served model. Another NCCL
        version or NCCL_CUMEM_ENABLE raises it too.
        """
        async with self._exclusive():
            if self._adapters:
                raise BadWeights(
                    f"weight group {plan.name}: --enable-lora excludes broadcasts; start the server without"
                )
            await asyncio.to_thread(self._check, Manifest.from_tensors(plan.name, plan.tensors()))
            if problem := nccl_problem(plan.nccl, plan.nccl_cumem, *nccl_settings()):
                raise BadWeights(f"weight group {plan.name}: {problem}")
            self.group = ""
            await self._on_workers("dppo_join_weight_group", plan.to_json())
            self.group = plan.name

    async def receive(self, group: str, step: str, version: int, mode: UpdateMode, wait_s: float) -> float:
        """Serve the weights that the trainer broadcasts in `step` of `group` as policy `version`. See `load`."""
        async with self._exclusive():
            if group != self.group:
                raise BadWeights(f"weight group {group}: the workers are in {self.group or 'none'}; join it first")
            try:
                return await self._update(f"group {group}", {"step": step}, version, mode, wait_s)
            except WeightsInconsistent:
                self.group = ""  # the connections are closed
                raise

    async def sleep(self) -> None:
        """Wait for running requests and discard weights and cache. After `wake` weights must be loaded."""
        async with self._exclusive():
            self._inconsistent = "the engine was put to sleep, which discards its weights"
            await self._engine.sleep(level=2, mode="wait")

    async def wake(self) -> None:
        async with self._exclusive():
            await self._engine.wake_up()

    async def load(self, path: Path, version: int, mode: UpdateMode, wait_s: float, read_ahead_bytes: int = 0) -> float:
        """Serve the weights in `path` as policy `version`. Returns how long sampling was paused, in seconds.

        A delta is read before the pause, up to each worker's share of `read_ahead_bytes`.

        Raises BadWeights or UnreadableWeights before the weights change. Raises TimeoutError when running requests do
        not end within `wait_s` (mode wait; the old weights stay in use). Raises WeightsInconsistent when loading itself
        fails.
        """
        async with self._exclusive():
            if (adapter := adapter_in(path, self._adapters)) is not None:
                return await self._update(str(path), adapter, version, mode, wait_s)
            await asyncio.to_thread(lambda: self._check(Manifest.read(path)))
            if is_delta(path):
                await self._read_ahead(path, read_ahead_bytes, wait_s)
            return await self._update(str(path), {"directory": str(path)}, version, mode, wait_s)

    async def _read_ahead(self, path: Path, most_bytes: int, wait_s: float) -> None:
        """Make the workers read `path` while they sample. Raises UnreadableWeights if any worker fails."""
        share = most_bytes // self._engine.vllm_config.parallel_config.world_size
        deadline, pause_s = time.monotonic() + wait_s, READ_POLL_S
        try:
            await self._on_workers("dppo_read_ahead", str(path), share)
        except RuntimeError as error:
            raise UnreadableWeights(str(error)) from None
        while True:
            replies = await self._engine.collective_rpc("dppo_has_read")
            if problems := [reply for reply in replies if isinstance(reply, str)]:
                raise UnreadableWeights("; ".join(problems))
            if all(replies):
                return
            if time.monotonic() > deadline:
                raise UnreadableWeights(f"{path}: not read within {wait_s:.0f} s")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 50 * READ_POLL_S)

    async def parts(self) -> dict[str, float]:
        """Return how long each part of the last update took, in seconds, on the slowest worker."""
        return max(await self._engine.collective_rpc("dppo_update_parts"), key=lambda parts: sum(parts.values()))

    async def _update(
        self, source: str, info: dict[str, Any] | LoRARequest, version: int, mode: UpdateMode, wait_s: float
    ) -> float:
        try:
            await asyncio.wait_for(self._engine.pause_generation(mode=mode, clear_cache=False), wait_s)
        except TimeoutError:
            await self._engine.resume_generation()
            raise
        paused = time.perf_counter()
        try:
            await self._swap(info, version, mode)
        except Exception as error:
            self._inconsistent = f"{source}: {error}"
            log.exception("weight update from %s failed half-way", source)
            # Kept requests must not continue under such weights.
            await self._engine.pause_generation(mode="abort")
            raise WeightsInconsistent(self._inconsistent) from error
        finally:
            await self._engine.resume_generation()
        self._inconsistent = None
        return time.perf_counter() - paused

    def _check(self, manifest: Manifest) -> None:
        if self._served is None:
            try:
                self._served = Manifest.read(self._model)
            except BadWeights as error:
                raise BadWeights(f"cannot read the tensors of the served model: {error}") from error
        manifest.check_replaces(self._served)

    async def _swap(self, info: dict[str, Any] | LoRARequest, version: int, mode: UpdateMode) -> None:
        if isinstance(info, LoRARequest):
            await self._on_workers("dppo_load_adapter", info.lora_path)
            self.adapter = info
        else:
            await self._on_workers("dppo_update_weights", info)
            self.adapter = None
        await self._engine.update_weight_version(str(version))
        self.version = version
        # Kept requests have cached keys and values from the old weights. They are preempted and prefilled again, so
        # each later token is drawn from exactly the policy in its tag.
        if not await self._engine.reset_prefix_cache(reset_running_requests=mode == "keep"):
            raise RuntimeError("the prefix cache still has keys and values of the old weights")

    async def _on_workers(self, method: str, *arguments: Any) -> None:
        """Call `method` on all workers. Raises RuntimeError with the problems that they return.

        Workers return errors: an exception in one worker would leave the other replies in vLLM's queues, and the next
        call would read them.
        """
        replies = await self._engine.collective_rpc(method, args=arguments)
        problems = [f"worker {number}: {reply}" for number, reply in enumerate(replies) if reply is not None]
        if problems:
            raise RuntimeError("; ".join(problems))
