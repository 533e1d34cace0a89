"""Fakes an engine without a server. The only worker is the real receiver, in a thread of trainer rank 0."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from dppo_megatron.rollout.engines.protocol import EngineError, EngineInfo, EngineTimeout, EngineUnavailable
from dppo_megatron.rollout.engines.vllm.extension.receiver import WeightReceiver
from dppo_megatron.weights.broadcast_plan import WeightGroupPlan
from dppo_megatron.weights.delta import DamagedDelta, PrefetchedVersion, Version
from dppo_megatron.weights.fingerprint import Fingerprint, add
from dppo_megatron.weights.process_group import WeightGroupError

LATE_S = 60.0
READ_AHEAD = 20_000  # bytes: some tensors, but not all
SCORES = np.linspace(-3, -1, 7, dtype=np.float32)

Result = TypeVar("Result")


def engine_info(version: int, instance: str, began: float | None, **more: Any) -> EngineInfo:
    """Return the info that a fake engine reports. `began` is when the running update began."""
    more |= {"instance": instance, "updating_s": None if began is None else time.monotonic() - began}
    return EngineInfo(version, 100, 64, 20, "processed_logprobs", "float32", "m", "fake", 0, **more)


class FakeEngine:
    """Keeps received tensors in `weights`. An engine with `down` does not answer.

    - dies_at: "join", "receive" or a bucket number. Callers learn that the engine died once `death_shows` is set.
    - freezes_at: the places of `dies_at`, "loaded", "check" (log-probs) or "held" (fingerprints). A frozen engine keeps
      connections open, and the client gives up after `timeout_s`.
    - front_lives: while the worker is frozen in an update, the process in front of it still answers.
    """

    def __init__(self, url: str):
        self.url = url
        self.down = False
        self.instance = "first"
        self.dies_at: str | int | None = None
        self.freezes_at: str | int | None = None
        self.front_lives = False
        self.timeout_s = LATE_S
        self._updating: float | None = None  # when the running update began
        self.death_shows = threading.Event()
        self.death_shows.set()
        self._thawed = threading.Event()
        self.served = -1
        self.weights: dict[str, torch.Tensor] = {}
        self.joined: list[str] = []
        self.corrupt: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, tensor: tensor
        self.score_offset: float | np.ndarray = 0.0
        self.events: list[str] = []  # calls in order; may be shared
        self._receiver: WeightReceiver | None = None
        self._group = ""

    async def sleep(self) -> None:
        self.events.append("sleep")

    async def wake(self) -> None:
        self.events.append("wake")

    async def health(self) -> None:
        if self.down:
            raise EngineUnavailable(f"engine {self.url}: connection failed")

    async def info(self) -> EngineInfo:
        await self.health()
        return engine_info(self.served, self.instance, self._updating, workers=1, weight_group=self._group)

    async def load_weights(self, path: Path, version: int, mode: str = "keep") -> float:
        def load() -> dict[str, torch.Tensor]:
            self._freeze_at("receive")
            try:
                ahead = PrefetchedVersion(Version(path), READ_AHEAD)
                self.weights = {name: tensor.clone() for name, tensor in ahead.tensors()}
            except DamagedDelta as error:
                raise EngineError(f"engine {self.url}: {error}") from error
            self._freeze_at("loaded")
            return self.weights

        self._die_at("receive")
        self.events.append("load")
        await self._update(load)
        self.served = version
        return 0.0

    async def join_weight_group(self, plan: WeightGroupPlan) -> None:
        self._die_at("join")
        self.joined.append(plan.name)
        self._group = ""

        def join() -> WeightReceiver:
            self._freeze_at("join")
            return WeightReceiver(plan, 0, torch.device("cpu"))

        self._receiver = await self._update(join)
        self._group = plan.name

    async def receive_weights(self, group: str, step: str, version: int, mode: str = "keep") -> float:
        assert group == self._group
        self._die_at("receive")
        try:
            self.weights = await self._update(lambda: self._receive(step))
        except WeightGroupError as error:
            self._group = ""
            raise EngineError(f"engine {self.url}: receiving policy {version}: {error}") from error
        self.served = version
        return 0.0

    def _receive(self, step: str) -> dict[str, torch.Tensor]:
        self._freeze_at("receive")
        received = {}
        for number, bucket in enumerate(self._receiver.receive(step)):
            self._die_at(number)
            self._freeze_at(number)
            received |= dict(bucket)
        self._freeze_at("loaded")
        return received

    async def _update(self, act: Callable[[], Result]) -> Result:
        """Run `act` in a thread, as a worker does. The client gives up after `timeout_s`."""

        def work() -> Result:
            try:
                return act()
            finally:
                self._updating = None

        self._updating = time.monotonic()
        return await self._client(asyncio.to_thread(work))

    async def _client(self, call: Awaitable[Result]) -> Result:
        try:
            return await asyncio.wait_for(call, self.timeout_s)
        except TimeoutError:
            raise EngineTimeout(f"engine {self.url}: no answer within {self.timeout_s:g} s") from None

    def _freeze_at(self, place: str | int) -> None:
        if self.freezes_at == place:
            self.freezes_at, self.down = None, not (self.front_lives and self._updating)
            self._thawed.wait()
            raise WeightGroupError("it was given up long ago")

    def _die_at(self, place: str | int) -> None:
        if self.dies_at == place:
            self.dies_at = None
            self.down = self.death_shows.is_set()
            if self._receiver is not None:
                self._receiver.close()
            self.death_shows.wait(LATE_S)
            self.down = True
            raise EngineUnavailable(f"engine {self.url}: died at {place}")

    async def weights_fingerprint(self) -> Fingerprint:
        held: Fingerprint = {}
        await self._client(asyncio.to_thread(self._freeze_at, "held"))
        for name, tensor in self.weights.items():
            add(held, name, self.corrupt(name, tensor))
        return held

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        self.events.append("check")
        await self._client(asyncio.to_thread(self._freeze_at, "check"))
        return SCORES + np.asarray(self.score_offset, np.float32)

    async def close(self) -> None:
        self._thawed.set()
        if self._receiver is not None:
            self._receiver.close()
