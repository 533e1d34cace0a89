"""The state machine of one engine: each transition that matters, and what holds after any events whatever."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dppo_megatron.fleet.health import (
    Answered,
    Delivered,
    EngineHealth,
    Failed,
    HealthRules,
    Published,
    Registered,
    Silent,
    State,
    Updating,
    Vanished,
    Verified,
    VerifyFailed,
    VerifyStarted,
)

RULES = HealthRules(failures=3, quarantine_s=2.0, longest_quarantine_s=10.0, publish_s=15.0)


def after(*events, start: EngineHealth | None = None, at: float = 0.0) -> EngineHealth:
    """The health after `events`, all at the same moment."""
    health = start or EngineHealth()
    for event in events:
        health = health.advance(event, at, RULES)
    return health


def serving(version: int = 4, instance: str = "a") -> EngineHealth:
    health = after(Registered(), Answered(instance, version), Published(version, instance), Answered(instance, version))
    assert health.state is State.SERVING
    return health


def test_confirmed_by_the_publisher_it_serves_once_it_reports_the_version():
    published = after(Registered(), Answered("a", 0), Published(0, "a"))
    assert published.state is State.STALE
    assert after(Answered("a", 0), start=published).state is State.SERVING


@pytest.mark.parametrize(
    "answer",
    [Answered("a", 3), Answered("b", 4)],
    ids=["another version than was confirmed", "another instance than was confirmed"],
)
def test_a_claim_that_nobody_confirmed_is_not_believed(answer):
    health = after(Registered(), Published(4, "a"), answer)
    assert health.state is State.STALE
    assert health.may_verify(0.0, RULES)


def test_an_unconfirmed_engine_serves_after_the_pool_verified_it():
    health = after(Registered(), Published(4), Answered("a", 4), VerifyStarted())
    assert health.state is State.VERIFYING
    assert after(Answered("a", 4), start=health).state is State.VERIFYING  # answering is not enough
    assert after(Verified("a", 4), start=health).state is State.SERVING


@pytest.mark.parametrize("verified", [Verified("a", 3), Verified("b", 4)], ids=["behind", "restarted meanwhile"])
def test_a_verification_of_something_else_does_not_admit(verified):
    health = after(Registered(), Published(4), Answered("a", 2), VerifyStarted(), verified)
    assert health.state is State.STALE
    assert health.may_verify(0.0, RULES)


def test_one_that_was_restarted_while_it_is_verified_must_be_verified_anew():
    health = after(Registered(), Published(4), Answered("a", 2), VerifyStarted(), Answered("b", 0))
    assert health.state is State.STALE
    assert health.may_verify(0.0, RULES)


def test_one_that_is_being_updated_is_alive_and_left_alone():
    """The publisher is loading the next policy into it: the published one must not be loaded over that."""
    stale = after(Registered(), Published(4), Answered("a", 2), Silent("busy"), Silent("busy"), Updating())
    assert (stale.state, stale.silent, stale.may_verify(0.0, RULES)) == (State.STALE, 0, False)
    assert after(Answered("a", 2), start=stale).may_verify(0.0, RULES)
    assert after(Updating(), start=serving()).state is State.SERVING


def test_a_verification_overtaken_by_the_next_policy_does_not_admit():
    health = after(Registered(), Published(4), Answered("a", 2), VerifyStarted(), Published(5), Verified("a", 4))
    assert health.state is State.STALE


def test_a_new_policy_that_the_publisher_confirmed_is_served_at_once():
    health = after(Published(5, "a"), start=serving(4))
    assert health.state is State.SERVING
    assert health.verified == ("a", 5)
    assert after(Answered("a", 4), start=health).state is State.STALE  # not what the publisher left


@pytest.mark.parametrize("confirmed", [None, "b"])
def test_a_new_policy_without_confirmation_ends_serving(confirmed):
    health = after(Published(5, confirmed), start=serving(4))
    assert health.state is State.STALE
    assert after(Answered("a", 5), start=health).state is State.STALE


def test_an_engine_that_the_next_policy_reached_already_is_left_alone():
    health = after(Answered("a", 5), start=serving(4))
    assert health.state is State.SERVING
    unproven = after(Registered(), Published(4), Answered("a", 5))
    assert unproven.state is State.STALE
    assert not unproven.may_verify(RULES.publish_s, RULES)  # loading would undo what the trainer is doing
    assert unproven.may_verify(RULES.publish_s + 1, RULES)  # nobody is: it only says so


def test_silence_makes_it_suspect_and_then_dead():
    health = after(Silent("no answer"), start=serving())
    assert health.state is State.SUSPECT
    assert after(Answered("a", 4), start=health).state is State.SERVING
    dead = after(Silent("no answer"), Silent("still none"), start=health)
    assert dead.state is State.DEAD
    assert dead.reason == "still none"


@pytest.mark.parametrize("version", [3, 4])
def test_a_dead_engine_that_answers_again_must_be_verified(version):
    dead = after(*[Silent("frozen")] * 3, start=serving(4))
    back = after(Answered("a", version), Answered("a", version), start=dead)
    assert back.state is State.STALE
    assert after(VerifyStarted(), Verified("a", 4), start=back).state is State.SERVING


def test_one_that_was_restarted_behind_its_address_must_be_verified():
    assert after(Answered("b", 4), start=serving(4)).state is State.STALE
    assert after(Silent("refused"), Answered("b", 4), start=serving(4)).state is State.STALE


def test_one_that_cannot_name_its_life_must_be_verified_after_every_silence():
    health = serving(4, instance="")
    assert after(Answered("", 4), start=health).state is State.SERVING
    assert after(Silent("refused"), Answered("", 4), start=health).state is State.STALE


def test_an_engine_that_never_verifies_is_quarantined_for_ever():
    health = EngineHealth()
    now = 0.0
    for _ in range(1100):  # 2**1024 is no float
        health = health._quarantine("log-probs differ", now, RULES)
        assert health.quarantined_until == now + min(2.0 * 2 ** min(health.quarantines - 1, 9), 10.0)
        now = health.quarantined_until


def test_failed_requests_quarantine_it_for_longer_each_time():
    health, now, waits = serving(), 0.0, []
    for _ in range(5):
        health = after(*[Failed("garbage")] * 3, start=health, at=now)
        assert health.state is State.DEAD
        waits.append(health.quarantined_until - now)
        assert after(Answered("a", 4), start=health, at=health.quarantined_until - 0.1).state is State.DEAD
        now = health.quarantined_until
        health = after(Answered("a", 4), VerifyStarted(), Verified("a", 4), start=health, at=now)
        assert health.state is State.SERVING
    assert waits == [2, 4, 8, 10, 10]
    assert after(Delivered(), *[Failed("x")] * 3, start=health, at=now).quarantined_until == now + 2


def test_a_delivery_between_them_forgives_failures():
    health = after(Failed("x"), Answered("a", 4), Failed("x"), Answered("a", 4), Delivered(), start=serving())
    assert after(Failed("x"), Failed("x"), start=health).state is State.SUSPECT


def test_a_failed_verification_is_tried_again_after_a_wait():
    health = after(Registered(), Published(4), Answered("a", 4), VerifyStarted(), VerifyFailed("scores differ"))
    assert health.state is State.DEAD
    assert after(Answered("a", 4), start=health, at=2.0).may_verify(2.0, RULES)


def test_starting_is_no_failure():
    health = after(Registered(), *[Silent("refused")] * 10)
    assert health.state is State.STARTING
    assert not health.alive


def test_since_is_the_time_of_the_last_change_of_state():
    health = serving().advance(Delivered(), 5.0, RULES).advance(Silent("x"), 7.0, RULES)
    assert health.advance(Silent("x"), 9.0, RULES).since == 7.0


INSTANCES, VERSIONS = st.sampled_from("ab"), st.integers(0, 1)  # few, so that they often agree
EVENTS = st.one_of(
    st.just(Registered()),
    st.just(Vanished()),
    st.builds(Answered, INSTANCES, VERSIONS),
    st.just(Silent("silent")),
    st.just(Delivered()),
    st.just(Failed("failed")),
    st.builds(Published, VERSIONS, st.none() | INSTANCES),
    st.just(VerifyStarted()),
    st.just(Updating()),
    st.builds(Verified, INSTANCES, VERSIONS),
    st.just(VerifyFailed("differs")),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(EVENTS, st.sampled_from([0.0, 0.5, 3.0, 20.0])), min_size=20, max_size=60))
def test_it_never_serves_unverified(history):
    """Since its last death or new address this instance was verified, by pool or publisher, at this version."""
    health, now, verified = EngineHealth(), 0.0, set()
    for event, wait in history:
        now += wait
        before, health = health, health.advance(event, now, RULES)
        match event:
            case Published(version, instance):
                verified &= {(i, v) for i, v in verified if version == before.published}
                verified |= {(instance, version)} - {(None, version)}
            case Verified(instance, version) if before.state is State.VERIFYING:
                verified.add((instance, version))
        died = health.state is State.DEAD and before.state is not State.DEAD
        if died or isinstance(event, Registered | Vanished):
            verified = set()
        if health.state is State.SERVING:
            assert health.verified == (health.instance, health.published)
            assert health.verified in verified
            assert health.silent == 0
        if before.state is State.DEAD:
            assert health.state in (State.DEAD, State.STALE, State.STARTING)
            if health.state is State.STALE:
                assert now >= before.quarantined_until
        if before.state is State.VERIFYING and health.state is State.SERVING:
            assert isinstance(event, Verified)
        if health.state is State.VERIFYING and before.state is not State.VERIFYING:
            assert before.state is State.STALE
            assert isinstance(event, VerifyStarted)


@settings(max_examples=100, deadline=None)
@given(st.lists(EVENTS, max_size=30))
def test_whatever_happened_a_verified_engine_comes_back(history):
    health, now = EngineHealth(), 0.0
    for event in history:
        now += 1.0
        health = health.advance(event, now, RULES)
    now += 100.0
    for event in (Registered(), Published(7), Answered("z", 0), VerifyStarted(), Verified("z", 7)):
        health = health.advance(event, now, RULES)
    assert health.state is State.SERVING
