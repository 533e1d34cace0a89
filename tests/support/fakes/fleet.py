"""Fakes inference servers in this process that die, freeze, report wrong weights and come back."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import AsyncMock

import numpy as np

from dppo_megatron.config import Config
from dppo_megatron.rollout.engines.protocol import (
    EngineInfo,
    EngineRefused,
    EngineUnavailable,
    GenerateRequest,
    InvalidSample,
)
from dppo_megatron.rollout.fleet.pool import EnginePool
from dppo_megatron.rollout.fleet.registry import Service
from dppo_megatron.rollout.fleet.sampling import Sampler
from dppo_megatron.run_dir import RunDir
from dppo_megatron.types import Rollout
from dppo_megatron.weights.published import PublishedFollower, PublishedPolicy
from tests.support.fakes.engine import engine_info

PROBE = [1, 2, 3]
A, B = "http://a", "http://b"
_INSTANCES = itertools.count()


def policy_scores(version: int) -> list[float]:
    """Return the trainer's scores of the weight check under policy `version`."""
    return [-1.0 - version, -0.5]


@dataclass
class FakeServer:
    """Serves the weights of policy `weights`, but reports policy `claims`."""

    weights: int = 0
    claims: int = 0
    instance: str = field(default_factory=lambda: f"instance-{next(_INSTANCES)}")
    up: bool = True
    frozen: bool = False
    ignores_loads: bool = False  # reports a load, but keeps the old weights
    refuses: bool = False
    misloads: bool = False  # has other bits than were sent, with log-probs within the tolerance
    corrupts: bool = False
    generate_s: float = 0.0
    load_s: float = 0.0
    asked: list[GenerateRequest] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)
    running: int = 0
    began: float | None = None  # start of the running load

    @property
    def bits(self) -> int:
        """Identify the weights. The trainer's weights are identified by the version."""
        return self.weights + 1000 * self.misloads

    def restart(self, weights: int, claims: int) -> None:
        self.instance = self.instance and f"instance-{next(_INSTANCES)}"
        self.weights, self.claims, self.up, self.frozen = weights, claims, True, False


class FakeEngine:
    """Fakes the client of a FakeServer. See `Engine`."""

    def __init__(self, url: str, server: FakeServer):
        self.url = url
        self.counts: Counter[str] = Counter()
        self._server = server
        self._instance: str | None = None  # instance that it first sampled from

    async def _reach(self, seconds: float = 0.0) -> None:
        instance, deadline = self._server.instance, time.monotonic() + seconds
        await asyncio.sleep(0)
        while self._server.frozen or time.monotonic() < deadline:
            self._check_up(instance)
            await asyncio.sleep(0.001)
        self._check_up(instance)

    def _check_up(self, instance: str) -> None:
        if not self._server.up or self._server.instance != instance:
            raise EngineUnavailable(f"engine {self.url}: connection refused")

    async def health(self) -> None:
        await self._reach()

    async def info(self) -> EngineInfo:
        await self._reach()
        return engine_info(self._server.claims, self._server.instance, self._server.began)

    async def load_weights(self, path: Path, version: int, mode: str = "keep") -> None:
        self._server.loads.append(version)
        self._server.began = time.monotonic()
        try:
            await self._reach(self._server.load_s)
        finally:
            self._server.began = None
        if self._server.refuses:
            raise EngineRefused(f"engine {self.url}: other shapes")
        self._server.claims = version
        if not self._server.ignores_loads:
            self._server.weights = version

    async def weights_fingerprint(self) -> dict[str, int]:
        await self._reach()
        return {"layer 0": self._server.bits}

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        await self._reach()
        assert list(token_ids) == PROBE
        return np.array(policy_scores(self._server.weights), np.float32)

    async def generate(self, request: GenerateRequest) -> tuple[Rollout, ...]:
        server = self._server
        self._instance = self._instance or server.instance
        if self._instance != server.instance:
            raise EngineUnavailable(f"engine {self.url}: the server was restarted")
        server.asked.append(request)
        server.running += 1
        try:
            await self._reach(server.generate_s)
        finally:
            server.running -= 1
        if server.corrupts:
            raise InvalidSample(f"engine {self.url}: NaN")
        if request.scored:
            own, logprob = request.token_ids[1:], np.full(len(request.token_ids) - 1, -1.0 - server.bits, np.float32)
            lists = {"topk_ids": own[:, None], "rollout_topk_logprob": logprob[:, None]}
            return (Rollout(own, logprob, np.full(len(own), server.claims, np.int32), "length", **lists),)
        rollouts = []
        for seed in request.seeds:
            tokens = np.random.default_rng([seed, server.bits]).integers(0, 99, 4).astype(np.int32)
            rollouts.append(Rollout(tokens, np.full(4, -1, np.float32), np.full(4, server.claims, np.int32), "stop"))
        return tuple(rollouts)

    async def close(self) -> None:
        pass


def request(name: str = "g") -> GenerateRequest:
    return GenerateRequest(name, np.array([1, 2]), 2, (7, 8), 1.0, 4)


@dataclass
class World:
    """Contains servers, the registry that lists them, and the trainer's publishing."""

    config: Config
    servers: dict[str, FakeServer]
    registered: dict[str, str] = field(default_factory=dict)  # name -> url
    pool: EnginePool | None = None  # while `live` runs

    def __post_init__(self):
        self.registered = self.registered or {f"engine-{i}": url for i, url in enumerate(self.servers)}

    def services(self) -> dict[str, Service]:
        return {name: Service(name, url, 0, "") for name, url in self.registered.items()}

    def build(self, config: Config, url: str) -> FakeEngine:
        return FakeEngine(url, self.servers[url])

    def publish(self, version: int, to: tuple[str, ...] | None = None, path: str | None = "/weights") -> None:
        """Publish as the trainer does: load into the servers `to`, by default all, and list them as confirmed.

        `path` None means a broadcast.
        """
        reached = self.servers if to is None else to
        for url in reached:
            self.servers[url].weights = self.servers[url].claims = version
        PublishedPolicy(
            version,
            path,
            time.time(),
            {url: self.servers[url].instance for url in reached},
            PROBE,
            policy_scores(version),
            {"layer 0": version},
        ).write(RunDir(self.config.run.dir).published)

    @asynccontextmanager
    async def live(
        self,
        check: Callable[[FakeEngine], Awaitable[None]] | None = None,
        timeout_s: float = 20.0,
        trainer: bool = True,
    ) -> AsyncIterator[Sampler]:
        """Yield a sampler on a pool that monitors the servers. By default, all engines suit the run."""
        self.pool = EnginePool(
            self.config,
            services=self.services,
            published=PublishedFollower(RunDir(self.config.run.dir).published, 5.0),
            build=self.build,
            check=check or AsyncMock(),
            trainer=trainer,
        )
        async with asyncio.timeout(timeout_s), self.pool:
            yield Sampler(self.pool)


def tokens(rollouts: Sequence[Rollout]) -> list[list[int]]:
    return [r.token_ids.tolist() for r in rollouts]


async def many(sampler: Sampler, count: int) -> list[tuple[Rollout, ...]]:
    """Return the samples of `count` concurrent requests."""
    return await asyncio.gather(*(sampler.generate(request(f"g{i}")) for i in range(count)))


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)
