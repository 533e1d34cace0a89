"""The state machine of one engine: each transition that matters, and what holds after any events whatever."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dppo_megatron.fleet.health import EngineHealth, HealthRules, State

RULES = HealthRules(failures=3, quarantine_s=2.0, longest_quarantine_s=10.0, publish_s=15.0)


def _event(name: str):
    """Build an event: the name of a method of `EngineHealth` and its values after the time."""
    return lambda *values: (name, *values)


registered, vanished, answered = map(_event, ("registered", "vanished", "answered"))
answered_updating, policy_published = map(_event, ("answered_updating", "policy_published"))
check_failed, request_failed, request_done = map(_event, ("check_failed", "request_failed", "request_done"))
verification_started, verification_passed, verification_failed = map(
    _event, ("verification_started", "verification_passed", "verification_failed")
)


def apply(health: EngineHealth, event: tuple, now: float) -> EngineHealth:
    return getattr(health, event[0])(now, *event[1:])


def after(*events, start: EngineHealth | None = None, at: float = 0.0) -> EngineHealth:
    """The health after `events`, all at the same moment."""
    health = start or EngineHealth(RULES)
    for event in events:
        health = apply(health, event, at)
    return health


def serving(version: int = 4, instance: str = "a") -> EngineHealth:
    health = after(
        registered(), answered(instance, version), policy_published(version, instance), answered(instance, version)
    )
    assert health.state is State.SERVING
    return health


def test_confirmed_by_the_publisher_it_serves_once_it_reports_the_version():
    published = after(registered(), answered("a", 0), policy_published(0, "a"))
    assert published.state is State.STALE
    assert after(answered("a", 0), start=published).state is State.SERVING


@pytest.mark.parametrize(
    "answer",
    [answered("a", 3), answered("b", 4)],
    ids=["another version than was confirmed", "another instance than was confirmed"],
)
def test_a_claim_that_nobody_confirmed_is_not_believed(answer):
    health = after(registered(), policy_published(4, "a"), answer)
    assert health.state is State.STALE
    assert health.may_verify(0.0)


def test_an_unconfirmed_engine_serves_after_the_pool_verified_it():
    health = after(registered(), policy_published(4), answered("a", 4), verification_started())
    assert health.state is State.VERIFYING
    assert after(answered("a", 4), start=health).state is State.VERIFYING  # answering is not enough
    assert after(verification_passed("a", 4), start=health).state is State.SERVING


@pytest.mark.parametrize(
    "verified", [verification_passed("a", 3), verification_passed("b", 4)], ids=["behind", "restarted meanwhile"]
)
def test_a_verification_of_something_else_does_not_admit(verified):
    health = after(registered(), policy_published(4), answered("a", 2), verification_started(), verified)
    assert health.state is State.STALE
    assert health.may_verify(0.0)


def test_one_that_was_restarted_while_it_is_verified_must_be_verified_anew():
    health = after(registered(), policy_published(4), answered("a", 2), verification_started(), answered("b", 0))
    assert health.state is State.STALE
    assert health.may_verify(0.0)


def test_one_that_is_being_updated_is_alive_and_left_alone():
    """The publisher is loading the next policy into it: the published one must not be loaded over that."""
    stale = after(
        registered(),
        policy_published(4),
        answered("a", 2),
        check_failed("busy"),
        check_failed("busy"),
        answered_updating(),
    )
    assert (stale.state, stale.failed_checks, stale.may_verify(0.0)) == (State.STALE, 0, False)
    assert after(answered("a", 2), start=stale).may_verify(0.0)
    assert after(answered_updating(), start=serving()).state is State.SERVING


def test_a_verification_overtaken_by_the_next_policy_does_not_admit():
    health = after(
        registered(),
        policy_published(4),
        answered("a", 2),
        verification_started(),
        policy_published(5),
        verification_passed("a", 4),
    )
    assert health.state is State.STALE


def test_a_new_policy_that_the_publisher_confirmed_is_served_at_once():
    health = after(policy_published(5, "a"), start=serving(4))
    assert health.state is State.SERVING
    assert health.verified == ("a", 5)
    assert after(answered("a", 4), start=health).state is State.STALE  # not what the publisher left


@pytest.mark.parametrize("confirmed", [None, "b"])
def test_a_new_policy_without_confirmation_ends_serving(confirmed):
    health = after(policy_published(5, confirmed), start=serving(4))
    assert health.state is State.STALE
    assert after(answered("a", 5), start=health).state is State.STALE


def test_an_engine_that_the_next_policy_reached_already_is_left_alone():
    health = after(answered("a", 5), start=serving(4))
    assert health.state is State.SERVING
    unproven = after(registered(), policy_published(4), answered("a", 5))
    assert unproven.state is State.STALE
    assert not unproven.may_verify(RULES.publish_s)  # loading would undo what the trainer is doing
    assert unproven.may_verify(RULES.publish_s + 1)  # nobody is: it only says so


def test_silence_makes_it_suspect_and_then_dead():
    health = after(check_failed("no answer"), start=serving())
    assert health.state is State.SUSPECT
    assert after(answered("a", 4), start=health).state is State.SERVING
    dead = after(check_failed("no answer"), check_failed("still none"), start=health)
    assert dead.state is State.DEAD
    assert dead.reason == "still none"


@pytest.mark.parametrize("version", [3, 4])
def test_a_dead_engine_that_answers_again_must_be_verified(version):
    dead = after(*[check_failed("frozen")] * 3, start=serving(4))
    back = after(answered("a", version), answered("a", version), start=dead)
    assert back.state is State.STALE
    assert after(verification_started(), verification_passed("a", 4), start=back).state is State.SERVING


def test_one_that_was_restarted_behind_its_address_must_be_verified():
    assert after(answered("b", 4), start=serving(4)).state is State.STALE
    assert after(check_failed("refused"), answered("b", 4), start=serving(4)).state is State.STALE


def test_one_that_cannot_name_its_life_must_be_verified_after_every_silence():
    health = serving(4, instance="")
    assert after(answered("", 4), start=health).state is State.SERVING
    assert after(check_failed("refused"), answered("", 4), start=health).state is State.STALE


def test_an_engine_that_never_verifies_is_quarantined_for_ever():
    health = EngineHealth(RULES)
    now = 0.0
    for _ in range(1100):  # 2**1024 is no float
        health = health._quarantine(now, "log-probs differ")
        assert health.quarantined_until == now + min(2.0 * 2 ** min(health.quarantines - 1, 9), 10.0)
        now = health.quarantined_until


def test_failed_requests_quarantine_it_for_longer_each_time():
    health, now, waits = serving(), 0.0, []
    for _ in range(5):
        health = after(*[request_failed("garbage")] * 3, start=health, at=now)
        assert health.state is State.DEAD
        waits.append(health.quarantined_until - now)
        assert after(answered("a", 4), start=health, at=health.quarantined_until - 0.1).state is State.DEAD
        now = health.quarantined_until
        health = after(answered("a", 4), verification_started(), verification_passed("a", 4), start=health, at=now)
        assert health.state is State.SERVING
    assert waits == [2, 4, 8, 10, 10]
    assert after(request_done(), *[request_failed("x")] * 3, start=health, at=now).quarantined_until == now + 2


def test_a_delivery_between_them_forgives_failures():
    health = after(
        request_failed("x"), answered("a", 4), request_failed("x"), answered("a", 4), request_done(), start=serving()
    )
    assert after(request_failed("x"), request_failed("x"), start=health).state is State.SUSPECT


def test_a_failed_verification_is_tried_again_after_a_wait():
    health = after(
        registered(),
        policy_published(4),
        answered("a", 4),
        verification_started(),
        verification_failed("scores differ"),
    )
    assert health.state is State.DEAD
    assert after(answered("a", 4), start=health, at=2.0).may_verify(2.0)


def test_starting_is_no_failure():
    health = after(registered(), *[check_failed("refused")] * 10)
    assert health.state is State.STARTING
    assert not health.alive


def test_since_is_the_time_of_the_last_change_of_state():
    health = serving().request_done(5.0).check_failed(7.0, "x")
    assert health.check_failed(9.0, "x").since == 7.0


INSTANCES, VERSIONS = st.sampled_from("ab"), st.integers(0, 1)  # few, so that they often agree
HISTORY_EVENTS = st.one_of(
    st.sampled_from([registered(), vanished(), request_done(), verification_started(), answered_updating()]),
    st.sampled_from([check_failed("silent"), request_failed("failed"), verification_failed("differs")]),
    st.tuples(st.sampled_from(["answered", "verification_passed"]), INSTANCES, VERSIONS),
    st.tuples(st.just("policy_published"), VERSIONS, st.none() | INSTANCES),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(HISTORY_EVENTS, st.sampled_from([0.0, 0.5, 3.0, 20.0])), min_size=20, max_size=60))
def test_it_never_serves_unverified(history):
    """Since its last death or new address this instance was verified, by pool or publisher, at this version."""
    health, now, verified = EngineHealth(RULES), 0.0, set()
    for event, wait in history:
        now += wait
        before, health = health, apply(health, event, now)
        match event:
            case ("policy_published", version, instance):
                verified &= {(i, v) for i, v in verified if version == before.published}
                verified |= {(instance, version)} - {(None, version)}
            case ("verification_passed", instance, version) if before.state is State.VERIFYING:
                verified.add((instance, version))
        died = health.state is State.DEAD and before.state is not State.DEAD
        if died or event[0] in ("registered", "vanished"):
            verified = set()
        if health.state is State.SERVING:
            assert health.verified == (health.instance, health.published)
            assert health.verified in verified
            assert health.failed_checks == 0
        if before.state is State.DEAD:
            assert health.state in (State.DEAD, State.STALE, State.STARTING)
            if health.state is State.STALE:
                assert now >= before.quarantined_until
        if before.state is State.VERIFYING and health.state is State.SERVING:
            assert event[0] == "verification_passed"
        if health.state is State.VERIFYING and before.state is not State.VERIFYING:
            assert before.state is State.STALE
            assert event[0] == "verification_started"


@settings(max_examples=100, deadline=None)
@given(st.lists(HISTORY_EVENTS, max_size=30))
def test_whatever_happened_a_verified_engine_comes_back(history):
    health, now = EngineHealth(RULES), 0.0
    for event in history:
        now += 1.0
        health = apply(health, event, now)
    now += 100.0
    for event in (
        registered(),
        policy_published(7),
        answered("z", 0),
        verification_started(),
        verification_passed("z", 7),
    ):
        health = apply(health, event, now)
    assert health.state is State.SERVING
