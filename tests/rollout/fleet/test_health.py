"""The state machine of one engine: its transitions, and invariants after any sequence of events."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dppo_megatron.rollout.fleet.health import EngineHealth, HealthRules, State

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


SERVES = (registered(), answered("a", 4), policy_published(4, "a"), answered("a", 4))
NAMELESS = (registered(), answered("", 4), policy_published(4, ""), answered("", 4))
VERIFIES = (registered(), policy_published(4), answered("a", 2), verification_started())
DIES = (check_failed("frozen"),) * 3
TRANSITIONS = {
    "confirmed by the publisher, it must report the version": (SERVES[:3], State.STALE),
    "and serves once it does": (SERVES, State.SERVING),
    "another version than was confirmed": ((registered(), policy_published(4, "a"), answered("a", 3)), State.STALE),
    "another instance than was confirmed": ((registered(), policy_published(4, "a"), answered("b", 4)), State.STALE),
    "an answer does not verify": ((*VERIFIES, answered("a", 4)), State.VERIFYING),
    "the pool verified it": ((*VERIFIES, verification_passed("a", 4)), State.SERVING),
    "the pool verified an older policy": ((*VERIFIES, verification_passed("a", 3)), State.STALE),
    "restarted before its verification ended": ((*VERIFIES, verification_passed("b", 4)), State.STALE),
    "restarted during its verification": ((*VERIFIES, answered("b", 0)), State.STALE),
    "overtaken by a policy": ((*VERIFIES, policy_published(5), verification_passed("a", 4)), State.STALE),
    "being updated, it is alive": ((*SERVES, answered_updating()), State.SERVING),
    "confirmed for the next policy": ((*SERVES, policy_published(5, "a")), State.SERVING),
    "it lost the next policy": ((*SERVES, policy_published(5, "a"), answered("a", 4)), State.STALE),
    "not confirmed for the next policy": ((*SERVES, policy_published(5), answered("a", 5)), State.STALE),
    "confirmed for a policy that is published again": ((*SERVES, policy_published(4, "a")), State.SERVING),
    "not confirmed for a policy that is published again": (
        (*SERVES, policy_published(4), answered("a", 4)),
        State.STALE,
    ),
    "published again without it during its verification": (
        (*VERIFIES, policy_published(4), verification_passed("a", 4)),
        State.STALE,
    ),
    "published again during its verification, which may load after that": (
        (*VERIFIES, policy_published(4, "a"), verification_passed("a", 4), answered("a", 4)),
        State.STALE,
    ),
    "excluded from the next policy, which it has after its verification": (
        (*VERIFIES, policy_published(5), verification_passed("a", 5)),
        State.STALE,
    ),
    "confirmed for the next policy during its verification": (
        (*VERIFIES, policy_published(5, "a"), verification_passed("a", 5), answered("a", 5)),
        State.SERVING,
    ),
    "another instance confirmed": ((*SERVES, policy_published(5, "b"), answered("a", 5)), State.STALE),
    "the next policy came before it was published": ((*SERVES, answered("a", 5)), State.SERVING),
    "silent": ((*SERVES, check_failed("no answer")), State.SUSPECT),
    "silent for a moment": ((*SERVES, check_failed("no answer"), answered("a", 4)), State.SERVING),
    "silent for too long": ((*SERVES, *DIES), State.DEAD),
    "back from the dead": ((*SERVES, *DIES, answered("a", 4), answered("a", 4)), State.STALE),
    "back with an older policy": ((*SERVES, *DIES, answered("a", 3), answered("a", 3)), State.STALE),
    "restarted behind its address": ((*SERVES, answered("b", 4)), State.STALE),
    "restarted while it was silent": ((*SERVES, check_failed("refused"), answered("b", 4)), State.STALE),
    "without a name for its instance": ((*NAMELESS, answered("", 4)), State.SERVING),
    "without a name, after silence": ((*NAMELESS, check_failed("refused"), answered("", 4)), State.STALE),
    "without a name, before the first answer": ((registered(), policy_published(4, ""), answered("", 4)), State.STALE),
    "a delivery forgives failures": (
        (*SERVES, *(request_failed("x"), answered("a", 4)) * 2, request_done(), *(request_failed("x"),) * 2),
        State.SUSPECT,
    ),
    "starting is no failure": ((registered(), *(check_failed("refused"),) * 10), State.STARTING),
}


@pytest.mark.parametrize("name", TRANSITIONS)
def test_events_lead_to_a_state(name):
    events, state = TRANSITIONS[name]
    health = after(*events)
    assert health.state is state
    assert health.alive == (state not in (State.STARTING, State.DEAD))
    if state is State.STALE:  # the pool loads it, and then it serves
        assert health.may_verify(0.0)
        passed = verification_passed(health.instance, health.published)
        assert after(verification_started(), passed, start=health).state is State.SERVING


def test_one_that_is_being_updated_is_not_loaded():
    """The publisher is loading the next policy into it: the published one must not be loaded over that."""
    stale = after(registered(), policy_published(4), answered("a", 2), *DIES[:2], answered_updating())
    assert (stale.state, stale.failed_checks, stale.may_verify(0.0)) == (State.STALE, 0, False)
    assert after(answered("a", 2), start=stale).may_verify(0.0)


def test_one_that_reports_a_later_policy_is_loaded_only_when_no_publish_can_be_under_way():
    unproven = after(registered(), policy_published(4), answered("a", 5))
    assert unproven.state is State.STALE
    assert not unproven.may_verify(RULES.publish_s)  # loading would undo the publish
    assert unproven.may_verify(RULES.publish_s + 1)


def test_the_last_reason_is_kept():
    assert after(*DIES[:2], check_failed("still none"), start=after(*SERVES)).reason == "still none"


def test_an_engine_that_never_verifies_is_quarantined_for_ever():
    health = EngineHealth(RULES)
    now = 0.0
    for _ in range(1100):  # 2**1024 is no float
        health = health._quarantine(now, "log-probs differ")
        assert health.quarantined_until == now + min(2.0 * 2 ** min(health.quarantines - 1, 9), 10.0)
        now = health.quarantined_until


def test_failed_requests_quarantine_it_for_longer_each_time():
    health, now, waits = after(*SERVES), 0.0, []
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


def test_since_is_the_time_of_the_last_change_of_state():
    health = after(*SERVES).request_done(5.0).check_failed(7.0, "x")
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
    health, now, verified, verifies = EngineHealth(RULES), 0.0, set(), False
    for event, wait in history:
        now += wait
        before, health = health, apply(health, event, now)
        match event:
            case ("policy_published", version, instance):
                again, verifies = before.state is State.VERIFYING and version == before.published, False
                verified = set() if again else {(instance, version)} - {(None, version)}
            case ("verification_started",) if before.state is State.STALE:
                verifies = True
            case ("verification_passed", instance, version) if before.state is State.VERIFYING and verifies:
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
