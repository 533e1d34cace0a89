"""Choose the engine that has a request's prefix in the cache, if the engine load permits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol, TypeVar

from dppo_megatron.rollout.engines.protocol import GenerateRequest

BOUND = 1.25  # no request is sent to an engine that would then have more than this multiple of the mean load
MAX_NAMES = 1 << 16  # groups and conversations with a known engine; the oldest are forgotten first


class LoadedEngine(Protocol):
    name: str
    running: int  # samples


EngineT = TypeVar("EngineT", bound=LoadedEngine)


class PrefixRouter:
    """Chooses an engine by `GenerateRequest.affinity`, names that requests with a common prefix share, widest first.

    A request goes to the engine that got the last request in the conversation, else to the engine that first got the
    group. Otherwise rendezvous hashing ranks all engines for the group, so the death or return of an engine moves only
    that engine's groups. An engine above `BOUND` is skipped. Requests without affinity go to the engine with the fewest
    running samples.

    Example: a turn with affinity ("group-5", "group-5.3") goes to the engine that sampled the last turn in conversation
    3. The first turn goes to the engine that has the group 5 prompt.
    """

    def __init__(self) -> None:
        self._engines: OrderedDict[str, str] = OrderedDict()  # affinity name -> engine name

    def choose(self, request: GenerateRequest, engines: Sequence[EngineT]) -> EngineT:
        """Return an engine from `engines`, which must not be empty, and remember it for the conversation."""
        idlest = min(engines, key=lambda engine: engine.running)
        if not request.affinity:
            return idlest
        load = sum(engine.running for engine in engines) + request.n
        cap = max(request.n, BOUND * load / len(engines))
        fit = {engine.name: engine for engine in engines if engine.running + request.n <= cap} or {idlest.name: idlest}
        last = (self._engines.get(name) for name in reversed(request.affinity))
        engine_name = next((name for name in last if name in fit), None)
        if engine_name is None:
            engine_name = max(fit, key=lambda name: _rank(request.affinity[0], name))
        self._engines[request.affinity[-1]] = engine_name
        self._engines.setdefault(request.affinity[0], engine_name)
        while len(self._engines) > MAX_NAMES:
            self._engines.popitem(last=False)
        return fit[engine_name]


def _rank(group: str, engine: str) -> bytes:
    return blake2b(f"{group}\n{engine}".encode(), digest_size=8).digest()
