"""Turns that an earlier orchestrator finished, and trajectories that fail, in the orchestrator's accounts."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from dppo_megatron.bank import BankWriter
from dppo_megatron.bank.journal import Journal, Journals
from dppo_megatron.config.task import EnvironmentConfig
from dppo_megatron.rollout.environments.interface import EnvironmentFailed
from dppo_megatron.rollout.environments.pool import EnvironmentPool
from dppo_megatron.rollout.orchestrator.dynamic_sampling import NoReward, SignalFilter
from tests.support.bank import make_group
from tests.support.fakes.orchestrator import World, sampling_config

GROUPS = 4


@pytest.mark.parametrize(("stored", "anew"), [(0, False), (7, False), (8, True)])
def test_turns_of_an_earlier_process_count_for_staleness(tmp_path, caplog, stored, anew):
    """At staleness 1, turns of policy 0 may be trained on in steps 0 and 1, so in one of the groups 0 to 7.

    The group is sampled last, and those begun after it wait for it.
    """
    w = World(sampling_config(tmp_path / "run", max_staleness=1))
    with BankWriter(w.run.bank, GROUPS, fsync=False) as bank:
        for position in range(1, stored + 1):
            bank.append(make_group(position))
    w.journals = Journals(tmp_path / "turns", ())
    journal = Journal(tmp_path / "turns", 0)
    sampled = make_group(0).rollouts[0]
    journal.add(0, np.ones(3, np.int32), replace(sampled, versions=np.zeros_like(sampled.versions)), 1.0)
    w.journals = Journals(tmp_path / "turns", ())
    assert w.journals.oldest_version(0) == 0
    w.run_attempt(w.engine(delay=lambda request: 0.2 if request.request_id == "group-0-0" else 0.0))
    w.journals.close()
    assert ("begins again" in caplog.text) == anew
    assert anew or 0 in np.ravel(w.steps()[:2])
    assert list((tmp_path / "turns").iterdir()) == []  # the bank has the group


def test_trajectories_that_all_fail_are_not_blamed_on_the_reward(tmp_path):
    pool = EnvironmentPool(EnvironmentConfig(agent="a:b"))
    group = SimpleNamespace(reward_failed=np.array([True]), prompt=SimpleNamespace(row=0))
    for text in ("it hung", "context_length_exceeded", "context_length_exceeded"):
        pool.count(group.prompt, EnvironmentFailed("raised", text))
    chooses = SignalFilter(sampling_config(tmp_path).rollout, str, lambda: pool.frequent_failure)
    why = (
        r"most trajectories with raised: context_length_exceeded; correct the environment or agent \(.*, then --resume"
    )
    assert all(chooses.keeps(group, 0) for _ in range(7))
    with pool, pytest.raises(NoReward, match=f"step 0: every reward of the last 8 groups failed, {why}"):
        chooses.keeps(group, 0)
