"""Requests find their prefix and load stays balanced, also when engines die and return; on engines that count hits."""

import heapq
import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest

from dppo_megatron.rollout.engines.protocol import GenerateRequest
from dppo_megatron.rollout.fleet.affinity import BOUND, PrefixRouter

GROUP, TURNS, PROMPT, TURN = 8, 6, 64, 48  # samples of a group, turns, tokens of the prompt and of a turn


@dataclass
class Engine:
    """Counts the prompt tokens that are in its prefix cache."""

    name: str
    running: int = 0
    up: bool = True
    life: int = 0  # counts its deaths
    cached: set[tuple[str, int]] = field(default_factory=set)  # (name in an affinity, turn)
    load: float = 0.0  # samples x seconds
    alive_s: float = 0.0

    def hits(self, group: str, conversation: str, turn: int) -> int:
        found = max((t for t in range(turn + 1) if (conversation, t) in self.cached), default=None)
        hit = PROMPT if (group, 0) in self.cached else 0
        if found is not None:
            hit = PROMPT + TURN * found
        self.cached |= {(group, 0), (conversation, turn + 1)}
        return hit


def request(group: str, conversation: int, n: int = 1) -> GenerateRequest:
    return GenerateRequest("r", np.array([1]), n, tuple(range(n)), 1.0, 1, affinity=(group, f"{group}.{conversation}"))


def play(count: int, *, groups: int = 96, together: int = 32, deaths: bool = False, router=None):
    """Play groups of conversations on engines.

    Return the share of hits, the mean load of each engine over the mean of all, and the highest share of the mean that
    an engine had when a request was sent to it, while at least 32 samples ran.
    """
    router, rng = router or PrefixRouter(), np.random.default_rng(0)
    engines = [Engine(f"engine-{i}") for i in range(count)]
    begun, numbers = iter(range(groups)), itertools.count()
    events: list[tuple[float, int, str, tuple]] = []  # time, number, kind, subject
    left: dict[str, int] = {}  # group -> conversations that are not over
    hit = asked = 0
    highest = clock = 0.0

    def push(delay: float, kind: str, *subject) -> None:
        heapq.heappush(events, (clock + delay, next(numbers), kind, subject))

    def begin() -> None:
        if (number := next(begun, None)) is not None:
            left[f"g{number}"] = GROUP
            for conversation in range(GROUP):
                push(0.0, "send", f"g{number}", conversation, 0)

    for _ in range(together):
        begin()
    if deaths:
        for at, number in ((10.0, 1), (25.0, 2)):
            push(at, "dies", engines[number])
            push(at + 10.0, "returns", engines[number])
    while events:
        now, _, kind, subject = heapq.heappop(events)
        serving = [engine for engine in engines if engine.up]
        for engine in serving:
            engine.load += engine.running * (now - clock)
            engine.alive_s += now - clock
        clock = now
        if kind == "send":
            group, conversation, turn = subject
            chosen = router.choose(request(group, conversation), serving)
            chosen.running += 1
            total = sum(engine.running for engine in serving)
            if total >= 32:
                highest = max(highest, chosen.running * len(serving) / total)
            hit += chosen.hits(group, f"{group}.{conversation}", turn)
            asked += PROMPT + TURN * turn
            push(rng.exponential(2.0) + 0.5, "done", chosen, chosen.life, *subject)
        elif kind == "done":
            chosen, life, group, conversation, turn = subject
            if chosen.life != life:
                push(0.0, "send", group, conversation, turn)
                continue
            chosen.running -= 1
            if turn + 1 < TURNS:
                push(rng.exponential(0.5), "send", group, conversation, turn + 1)
                continue
            left[group] -= 1
            if not left[group]:
                begin()
        elif kind == "dies":
            (engine,) = subject
            engine.up, engine.running, engine.cached, engine.life = False, 0, set(), engine.life + 1
        else:
            subject[0].up = True
    loads = np.array([engine.load / engine.alive_s for engine in engines])
    return hit / asked, loads / loads.mean(), highest


class LeastLoaded:
    def choose(self, request, engines):
        return min(engines, key=lambda engine: engine.running)


@pytest.fixture(scope="module")
def of_one_engine() -> float:
    return play(1)[0]


@pytest.mark.parametrize("deaths", [False, True], ids=["steady", "deaths and returns"])
def test_conversations_find_their_prefix_and_load_is_bounded(of_one_engine, deaths):
    hits, loads, highest = play(4, deaths=deaths)
    assert hits >= 0.95 * of_one_engine
    assert loads.max() <= BOUND
    assert highest <= BOUND + 1e-9
    assert play(4, deaths=deaths, router=LeastLoaded())[0] < 0.8 * of_one_engine


def test_a_death_moves_only_the_groups_of_that_engine_and_a_return_takes_only_new_ones():
    engines = [Engine(f"engine-{i}") for i in range(4)]

    def places(router, count, serving):
        return {number: router.choose(request(f"g{number}", 0), serving).name for number in range(count)}

    router = PrefixRouter()
    before = places(router, 400, engines)
    assert places(PrefixRouter(), 400, engines) == before  # another process, such as one after a restart
    assert max(list(before.values()).count(engine.name) for engine in engines) < 130
    during = places(router, 400, engines[1:])
    assert {number for number in before if before[number] != during[number]} == {
        number for number, name in before.items() if name == "engine-0"
    }
    assert places(router, 400, engines) == during  # their prefixes are where they are
    assert places(PrefixRouter(), 400, engines) == before


def test_a_turn_that_had_to_move_stays_and_its_siblings_do_not_follow():
    engines = [Engine("a"), Engine("b")]
    router = PrefixRouter()
    home = router.choose(request("g", 0), engines)
    other = engines[home is engines[0]]
    home.running, other.running = 8, 0
    assert router.choose(request("g", 0), engines) is other
    home.running = 0
    assert router.choose(request("g", 0), engines) is other
    assert router.choose(request("g", 1), engines) is home


@pytest.mark.parametrize(
    ("home", "other", "n", "stays"),
    [
        (4, 3, 1, True),  # 5 samples, and the mean with the request is 4
        (8, 0, 8, False),  # it would have 16, and the mean is 8
        (5, 4, 8, False),  # neither has room, so the one with fewer samples gets it
    ],
)
def test_the_samples_of_a_request_count_for_the_bound(home, other, n, stays):
    engines, router = [Engine("a"), Engine("b")], PrefixRouter()
    first = router.choose(request("g", 0), engines)
    first.running, engines[first is engines[0]].running = home, other
    assert (router.choose(request("g", 0, n), engines) is first) == stays


def test_requests_without_affinity_go_to_the_least_loaded_engine():
    engines = [Engine("a", 4), Engine("b", 3), Engine("c", 5)]
    alone = GenerateRequest("r", np.array([1]), 8, tuple(range(8)), 1.0, 1)
    assert PrefixRouter().choose(alone, engines).name == "b"


def test_the_names_of_old_conversations_are_forgotten(monkeypatch):
    monkeypatch.setattr("dppo_megatron.rollout.fleet.affinity.MAX_NAMES", 10)
    router = PrefixRouter()
    for number in range(50):
        router.choose(request(f"g{number}", 0), [Engine("a")])
    assert router._engines.keys() == {name for n in range(45, 50) for name in (f"g{n}", f"g{n}.0")}
