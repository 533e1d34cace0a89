"""The orchestrator on a scripted engine: order, staleness, dropping, invalid samples, evaluation, many attempts."""

import errno
import itertools
import os
import resource
import time

import numpy as np
import pytest

from dppo_megatron.bank import BankWriteError
from dppo_megatron.common.progress import last_progress
from dppo_megatron.config import ConfigError
from dppo_megatron.rollout.engines.protocol import EngineUnavailable
from dppo_megatron.rollout.orchestrator.dynamic_sampling import NoReward, NoSignal
from dppo_megatron.rollout.orchestrator.main import allow_open_files
from dppo_megatron.run.launch.evaluate import with_settings
from dppo_megatron.types import Prompt
from dppo_megatron.weights.published import PolicyTimeout, PublishedFollower, PublishedPolicy
from tests.support.fakes.orchestrator import World, sampling_config

GROUPS = 4


def position(request) -> int:
    return int(request.token_ids[0])


def trains(request) -> bool:
    return request.request_id.startswith("group-")


def later_ones_first(request) -> float:
    return 0.004 * (3 - position(request) % 4)


def version_of(group) -> int:
    (version,) = {int(v) for rollout in group.rollouts for v in rollout.versions}
    return version


@pytest.fixture
def world(tmp_path):
    def make(*, steps: int = 3, training_s: float = 0.0, last_version=None, hopeless=None, broken=None, **rollout):
        config = sampling_config(tmp_path / "run", steps=steps, **rollout)
        never = lambda _: False  # noqa: E731
        return World(config, hopeless or never, broken or never, training_s, last_version)

    return make


def test_the_samples_of_an_epoch_are_the_drafts_of_the_next(world, monkeypatch):
    four_rows = lambda _, p: Prompt(p, p % 4, np.array([p % 4, 9], np.int32), "", "")  # noqa: E731
    monkeypatch.setattr("tests.support.fakes.orchestrator.Prompts.prompt", four_rows)
    w = world(steps=2)
    w.config = with_settings(w.config, engine={"draft_tokens": 4})
    engine = w.engine()
    w.run_attempt(engine)
    samples = {g.prompt.position: [[*g.prompt.token_ids, *r.token_ids] for r in g.rollouts] for g in w.groups()}
    for request in filter(trains, engine.requests):
        number = int(request.request_id.split("-")[1])
        assert [tokens.tolist() for tokens in request.drafts] == samples.get(number - 4, [])


def test_every_step_is_sampled_by_its_own_policy_in_prompt_order(world):
    w = world(hopeless=lambda p: p % 3 == 0)  # kept without dynamic sampling
    engine = w.engine(delay=later_ones_first)
    w.run_attempt(engine)
    assert w.steps() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert [version_of(group) for group in w.groups()] == [0] * 4 + [1] * 4 + [2] * 4
    assert [group.prompt.position for group in w.groups()][:4] != [0, 1, 2, 3]  # appended as they came
    generated = [record for record in w.records() if "time/generate_s" in record]
    assert [record["step"] for record in generated] == [1, 2, 3]
    assert all(record["rollout/dropped_groups"] == 0 for record in generated)
    assert w.dropped() == []
    seeds = [seed for request in engine.requests if trains(request) for seed in request.seeds]
    assert len(set(seeds)) == len(seeds) == 3 * GROUPS * 3
    assert all(request.stop_token_ids == (99,) for request in engine.requests)


@pytest.mark.parametrize("staleness", [1, 2])
def test_staleness_is_used_and_bounded(world, staleness):
    w = world(steps=5, training_s=0.03, max_staleness=staleness)
    w.run_attempt(w.engine(delay=later_ones_first))
    groups = w.groups()
    lags = [index // GROUPS - version_of(group) for index, group in enumerate(groups)]
    assert max(lags) == staleness
    assert min(lags) >= 0
    assert sorted(group.prompt.position for group in groups) == list(range(5 * GROUPS))


def test_no_more_groups_at_once_than_allowed(world):
    w = world(max_concurrent_groups=2)
    engine = w.engine(delay=lambda request: 0.002 * trains(request))
    w.run_attempt(engine)
    assert engine.most_running == 2
    assert [len(step) for step in w.steps()] == [GROUPS] * 3


@pytest.mark.parametrize("delay", [lambda request: 0.0, later_ones_first], ids=["in order", "later first"])
def test_groups_without_signal_are_replaced(world, delay):
    """The prompts used are the shortest beginning of the order that fills the run, whichever group ends first."""
    w = world(dynamic_sampling=True, hopeless=lambda p: p % 3 == 0)
    engine = w.engine(delay=delay)
    w.run_attempt(engine)
    kept = [p for p in range(18) if p % 3]
    assert w.steps() == [kept[:4], kept[4:8], kept[8:12]]
    assert [version_of(group) for group in w.groups()] == [0] * 4 + [1] * 4 + [2] * 4
    dropped = w.dropped()
    assert sorted(record["position"] for record in dropped) == [0, 3, 6, 9, 12, 15]
    assert {record["reason"] for record in dropped} == {"no_signal"}
    assert dropped[0]["row"] == dropped[0]["position"] % 7
    assert dropped[0]["detail"] == "rewards of 3 samples are all 1, 0 failed"
    assert sorted(position(r) for r in engine.requests if trains(r)) == sorted([*kept, 0, 3, 6, 9, 12, 15])
    assert sum(record.get("rollout/dropped_groups", 0) for record in w.records()) == 6


def test_failed_verifiers_are_no_signal(world):
    w = world(steps=1, dynamic_sampling=True, broken=lambda p: p == 1)
    w.run_attempt(w.engine())
    assert w.steps() == [[0, 2, 3, 4]]
    assert w.dropped()[0]["detail"] == "no reward, 3 failed"


def test_a_run_stops_after_many_failed_rewards_in_a_row_and_names_the_failure(world):
    w = world(steps=9, broken=lambda p: p > 5)
    with pytest.raises(NoReward, match=r"every reward of the last 8 groups failed, the last one with raised: .*Broken"):
        w.run_attempt(w.engine())
    assert len(w.groups()) >= 6


def test_too_few_groups_with_signal_is_an_error(world):
    w = world(dynamic_sampling=True, max_prompts_per_group=2, hopeless=lambda p: p >= 6)
    with pytest.raises(NoSignal, match=r"step 1: 5 prompts .*rollout.max_prompts_per_group = 2.*--resume"):
        w.run_attempt(w.engine())
    assert w.steps() == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("ends", [(1,), (2, 5), (4, 6, 10)])
def test_a_run_of_many_attempts_equals_one_of_one_attempt(world, tmp_path, dynamic, ends):
    undisturbed = World(
        sampling_config(tmp_path / "undisturbed", dynamic_sampling=dynamic), hopeless=lambda p: p % 3 == 0
    )
    undisturbed.run_attempt(undisturbed.engine())
    w = world(dynamic_sampling=dynamic, hopeless=lambda p: p % 3 == 0)
    for groups in ends:
        w.run_attempt(w.engine(delay=later_ones_first), until_groups=groups)
    before = [record["position"] for record in w.dropped()]
    last = w.engine(delay=later_ones_first)
    w.run_attempt(last)
    assert not set(before) & {position(request) for request in last.requests if trains(request)}
    assert w.steps() == undisturbed.steps()
    assert sorted(r["position"] for r in w.dropped()) == sorted(r["position"] for r in undisturbed.dropped())
    tokens = [
        {g.prompt.position: [r.token_ids.tolist() for r in g.rollouts] for g in run.groups()}
        for run in (w, undisturbed)
    ]
    assert tokens[0] == tokens[1]


def test_invalid_samples_are_drawn_again_with_other_seeds(world):
    w = world(steps=1)
    engine = w.engine(corrupts=lambda request: request.request_id in ("group-2-0", "group-2-1"))
    w.run_attempt(engine)
    assert w.steps() == [[0, 1, 2, 3]]
    attempts = [request for request in engine.requests if trains(request) and position(request) == 2]
    assert [request.request_id for request in attempts] == ["group-2-0", "group-2-1", "group-2-2"]
    assert not any(set(a.seeds) & set(b.seeds) for a, b in itertools.combinations(attempts, 2))
    assert sum(record.get("rollout/invalid_samples", 0) for record in w.records()) == 2


def test_an_engine_that_dies_stops_the_run_and_ends_all_requests(world):
    w = world()
    engine = w.engine(
        delay=lambda request: 0.0 if not trains(request) or position(request) == 1 else 5.0,
        fails=lambda request: EngineUnavailable("gone") if trains(request) else None,
    )
    with pytest.raises(EngineUnavailable, match="gone"):
        w.run_attempt(engine)
    assert engine.running == 0


def evaluations_of(w, engine) -> dict[int, set[int]]:
    """Version asked for -> versions that answered."""
    asked = {int(name.split("-")[1]): set() for name in engine.versions if name.startswith("eval-")}
    for name, version in engine.versions.items():
        if name.startswith("eval-"):
            asked[int(name.split("-")[1])].add(version)
    return asked


def test_asynchronous_sampling_goes_on_while_a_policy_is_evaluated(world):
    w = world(steps=8, max_staleness=2, training_s=0.08, max_concurrent_groups=8)
    asked = {}
    engine = w.engine(delay=lambda request: {"eval-0-0-0": 1.5}.get(request.request_id, 0.2 * (not trains(request))))
    engine.fails = lambda request: asked.setdefault(request.request_id, len(engine.requests)) and None
    w.run_attempt(engine)
    assert [trains(request) for request in engine.requests[:3]] == [False, False, True]  # no group waits before them
    assert asked["eval-0-0-0"] > 4 * GROUPS  # when it was answered: more than needs no later policy
    assert evaluations_of(w, engine).keys() == {0, 2, 4, 6, 8}
    assert sorted(r["step"] for r in w.records() if "eval/accuracy" in r) == [0, 2, 4, 6, 8]


def test_policies_that_are_published_after_the_last_group_are_evaluated(world):
    w = world(max_staleness=3, training_s=0.2)  # the first policy samples all groups
    engine = w.engine()
    w.run_attempt(engine)
    assert evaluations_of(w, engine).keys() == {0, 2, 3}


def test_synchronous_evaluations_are_of_one_policy_however_long_they_take(world):
    w = world(steps=3, max_concurrent_groups=1)
    engine = w.engine(delay=lambda request: 0.0 if trains(request) else 0.1)
    w.run_attempt(engine)
    assert evaluations_of(w, engine) == {0: {0}, 2: {2}, 3: {3}}
    spreads = [r["eval/version_spread"] for r in w.records() if "eval/accuracy" in r]
    assert spreads == [0, 0, 0]


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_evaluation_that_fails_ends_the_run(world, staleness):
    w = world(steps=3, max_staleness=staleness)
    with pytest.raises(EngineUnavailable, match="gone"):
        w.run_attempt(w.engine(fails=lambda request: None if trains(request) else EngineUnavailable("gone")))


def test_every_evaluated_prompt_shows_progress(world):
    w = world(steps=1)
    shown = []
    engine = w.engine()
    engine.delay = lambda request: shown.append(last_progress(w.run.rollout_metrics)) or 0.0
    w.run_attempt(engine)
    assert shown[0] == "nothing recorded or evaluated yet"
    assert shown[-1].startswith("last record or evaluated prompt at ")


def test_a_trainer_that_stops_publishing_is_an_error(tmp_path):
    w = World(with_settings(sampling_config(tmp_path / "run"), run={"stall_timeout_s": 0.2}), last_version=1)
    with pytest.raises(PolicyTimeout, match="for policy version 2"):
        w.run_attempt(w.engine())
    assert len(w.steps()) == 2


async def test_a_trainer_that_advances_may_take_longer_than_the_limit_for_a_policy(tmp_path):
    began = time.monotonic()
    follower = PublishedFollower(tmp_path / "published.json", 0.3, lambda: min(time.monotonic() - began, 1.0))
    with pytest.raises(PolicyTimeout, match="no progress of the trainer for 0 s"):
        await follower.wait_for(1)
    assert 1.2 < time.monotonic() - began < 10


def test_a_policy_file_with_a_stale_handle_is_read_again(tmp_path, monkeypatch):
    follower = PublishedFollower(tmp_path / "published.json", 1.0)
    assert follower.current is None
    for version in (1, 2):
        PublishedPolicy(version, "w", 0.0).write(tmp_path / "published.json")
        with monkeypatch.context() as patch:
            patch.setattr(os, "fstat", lambda number: (_ for _ in ()).throw(OSError(errno.ESTALE, "stale")))
            assert follower.current == (None if version == 1 else PublishedPolicy(1, "w", 0.0))
        assert follower.current.version == version


def test_the_limit_of_open_files_is_raised_or_named(tmp_path, monkeypatch):
    limits = [(1024, 4000)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    allow_open_files(sampling_config(tmp_path, max_concurrent_groups=400, group_size=8))
    assert limits[-1] == (4000, 4000)
    with pytest.raises(ConfigError, match=r"4000 .*\n.*max_concurrent_groups = 500 with rollout.group_size = 8"):
        allow_open_files(sampling_config(tmp_path, max_concurrent_groups=500, group_size=8))


def slow_prompt_1(request) -> float:
    """Prompt 1 takes several steps' time, everything else next to none."""
    return 0.0 if not trains(request) else 1.0 if position(request) == 1 else 0.002


@pytest.mark.parametrize("beyond", ["wait", "drop", "train"])
def test_beyond_the_bound(world, beyond):
    """The step waits, another prompt takes the group's place, or the group is trained on late."""
    w = world(steps=5, max_staleness=1, beyond_bound=beyond)
    engine = w.engine(delay=slow_prompt_1)
    w.run_attempt(engine)
    lags = {g.prompt.position: index // GROUPS - version_of(g) for index, g in enumerate(w.groups())}
    late = lags.pop(1, None)
    assert sorted(lags) == [p for p in range(5 * GROUPS + (beyond == "drop")) if p != 1]
    assert max(lags.values()) <= 1
    assert late is None if beyond == "drop" else (late > 1) == (beyond == "train")
    given_up = [(1, "too_stale")] if beyond == "drop" else []
    assert [(record["position"], record["reason"]) for record in w.dropped()] == given_up
    assert sum(record.get("rollout/too_stale_groups", 0) for record in w.records()) == len(given_up)
    assert engine.running == 0


def test_nothing_is_given_up_while_the_trainer_is_busy(world):
    """The slow group ends before the trainer needs its place."""
    w = world(steps=5, max_staleness=1, beyond_bound="drop", training_s=0.3)
    w.run_attempt(w.engine(delay=lambda request: slow_prompt_1(request) / 10))
    assert w.dropped() == []
    assert sorted(g.prompt.position for g in w.groups()) == list(range(5 * GROUPS))


def test_a_group_that_the_disk_refuses_ends_the_run_at_once(world, monkeypatch):
    """Not as a trainer that stopped publishing, though that waits for the group."""
    w = world(steps=3)
    real, calls = os.pwritev, itertools.count()

    def pwritev(*call):
        if next(calls) > 9:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*call)

    monkeypatch.setattr(os, "pwritev", pwritev)
    with pytest.raises(BankWriteError, match="No space left on device") as raised:
        w.run_attempt(w.engine())
    assert raised.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert w.steps() == [[0, 1, 2, 3]]
