"""An engine without a server: its one worker is the real receiver, in a thread of the trainer's rank 0."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np
import torch

from dppo_megatron.engines.protocol import EngineError, EngineInfo, EngineUnavailable
from dppo_megatron.engines.vllm.extension.receiver import WeightReceiver
from dppo_megatron.weights.broadcast_plan import WeightGroupPlan
from dppo_megatron.weights.process_group import WeightGroupError

LATE_S = 60.0
SCORES = np.linspace(-3, -1, 7, dtype=np.float32)


class FakeEngine:
    """Keeps what it receives in `weights`. `dies_at` names what kills it: "join", "receive", or a bucket's number.

    `down` engines do not answer. One that freezes at the bucket `freezes_at` keeps its connections too. Who asked one
    that dies hears of it once `death_shows` is set.
    """

    def __init__(self, url: str):
        self.url = url
        self.down = False
        self.instance = "first"
        self.dies_at: str | int | None = None
        self.freezes_at: int | None = None
        self.death_shows = threading.Event()
        self.death_shows.set()
        self._thawed = threading.Event()
        self.served = -1
        self.weights: dict[str, torch.Tensor] = {}
        self.joined: list[str] = []
        self.score_offset: float | np.ndarray = 0.0
        self.events: list[str] = []  # what happens to it; may be shared
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
        return EngineInfo(
            self.served,
            61,
            64,
            20,
            "processed_logprobs",
            "float32",
            "m",
            "fake",
            0,
            workers=1,
            weight_group=self._group,
            instance=self.instance,
        )

    async def load_weights(self, path: Path, version: int, mode: str = "keep") -> None:
        from safetensors.torch import load_file

        self._die_at("receive")
        self.events.append("load")
        self.weights = {k: v for file in sorted(path.glob("*.safetensors")) for k, v in load_file(file).items()}
        self.served = version

    async def join_weight_group(self, plan: WeightGroupPlan) -> None:
        self._die_at("join")
        self.joined.append(plan.name)
        self._group = ""
        self._receiver = await asyncio.to_thread(WeightReceiver, plan, 0, torch.device("cpu"))
        self._group = plan.name

    async def receive_weights(self, group: str, step: str, version: int, mode: str = "keep") -> None:
        assert group == self._group
        self._die_at("receive")
        try:
            self.weights = await asyncio.to_thread(self._receive, step)
        except WeightGroupError as error:
            self._group = ""
            raise EngineError(f"engine {self.url}: receiving policy {version}: {error}") from error
        self.served = version

    def _receive(self, step: str) -> dict[str, torch.Tensor]:
        received = {}
        for number, bucket in enumerate(self._receiver.receive(step)):
            self._die_at(number)
            if number == self.freezes_at:
                self.freezes_at, self.down = None, True
                self._thawed.wait()
                raise WeightGroupError("it was given up long ago")
            received |= dict(bucket)
        return received

    def _die_at(self, place: str | int) -> None:
        if self.dies_at == place:
            self.dies_at = None
            self.down = self.death_shows.is_set()
            if self._receiver is not None:
                self._receiver.close()
            self.death_shows.wait(LATE_S)
            self.down = True
            raise EngineUnavailable(f"engine {self.url}: died at {place}")

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        self.events.append("check")
        return SCORES + np.asarray(self.score_offset, np.float32)

    async def close(self) -> None:
        self._thawed.set()
        if self._receiver is not None:
            self._receiver.close()
