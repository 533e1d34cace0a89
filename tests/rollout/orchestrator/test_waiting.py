"""Groups between sampling and the bank: counted while in memory, spilled beyond that, and stored the same."""

import os
import threading
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from dppo_megatron.bank import BankReader, BankTimeout
from dppo_megatron.rollout.engines.byte_budget import ByteBudget
from dppo_megatron.rollout.orchestrator import orchestrator as module
from dppo_megatron.rollout.orchestrator import waiting
from dppo_megatron.rollout.orchestrator.waiting import WaitingGroups, spill
from tests.support.bank import make_group
from tests.support.fakes.orchestrator import World, sampling_config


def assert_equal(found, expected) -> None:
    for one, other in zip(found, expected, strict=True):
        for field in fields(other):
            assert np.array_equal(getattr(one, field.name), getattr(other, field.name)), field.name


def in_memory(rollouts) -> bool:
    array = rollouts[0].token_ids
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.base is None


def test_spilled_rollouts_are_unchanged_and_leave_no_file(tmp_path):
    def mapped() -> bool:
        return str(tmp_path) in Path("/proc/self/maps").read_text()

    rollouts, before = make_group(0, topk=3, experts=4).rollouts, len(os.listdir("/proc/self/fd"))
    aside = spill(rollouts, tmp_path)
    assert_equal(aside, rollouts)
    assert not any(tmp_path.iterdir())
    assert len(os.listdir("/proc/self/fd")) == before
    assert mapped()
    del aside
    assert not mapped()  # the file is gone with its group


async def test_beyond_half_of_the_room_groups_are_laid_aside(tmp_path):
    first, second = (make_group(p, samples=4, longest=50, topk=3).rollouts for p in (1, 2))
    size = sum(array.nbytes for r in first for _, array in waiting._arrays(r))

    budget = ByteBudget(2 * size)
    groups = WaitingGroups(budget, tmp_path)
    kept = await groups.keep(1, first)
    assert kept == first
    assert budget.charged == size
    aside = await groups.keep(2, second)
    assert budget.charged == size
    assert not in_memory(aside)
    assert_equal(aside, second)
    groups.release(2)
    groups.release(1)
    groups.release(1)  # as where a run ends while a record is being written
    assert budget.charged == 0


async def test_where_nothing_can_be_laid_aside_it_waits_in_memory(tmp_path, caplog):
    rollouts = make_group(0).rollouts

    budget = ByteBudget(1)
    groups = WaitingGroups(budget, tmp_path / "gone")
    assert await groups.keep(3, rollouts) == rollouts
    assert budget.charged > 0
    groups.release(3)
    assert budget.charged == 0
    assert "prompt 3 waits in memory" in caplog.text


@pytest.mark.parametrize("most", [1, 1 << 30])
def test_a_run_stores_the_same_whatever_room_there_is(tmp_path, monkeypatch, most):
    """Step 1's first group is slow, and all others wait for it; with hardly any room they do so in files."""
    aside, budgets = [], []
    monkeypatch.setattr(waiting, "spill", lambda rollouts, at: aside.append(len(rollouts)) or spill(rollouts, at))

    def budget() -> ByteBudget:
        budgets.append(ByteBudget(most))
        return budgets[-1]

    monkeypatch.setattr(module, "ByteBudget", budget)
    config = sampling_config(tmp_path / "run", steps=3, max_staleness=1)
    world = World(config)
    world.run_attempt(world.engine(delay=lambda request: 0.2 if int(request.token_ids[0]) == 4 else 0.0))
    groups = world.groups()
    assert sorted(group.prompt.position for group in groups) == list(range(12))
    assert bool(aside) == (most == 1)
    assert [found.charged for found in budgets] == [0]  # everything was given back
    assert BankReader(Path(config.run.dir) / "bank").refresh() == 12


def test_a_disk_that_does_not_answer_is_named_while_it_does_not(tmp_path, monkeypatch):
    """Closing the bank waits for the write, so the error is raised only once the disk works again."""
    w = World(sampling_config(tmp_path / "run", steps=1))
    real, named = os.pwritev, threading.Event()

    def pwritev(*call):
        if threading.current_thread().name.startswith("bank-writer"):
            named.wait(2)
        return real(*call)

    monkeypatch.setattr(os, "pwritev", pwritev)
    monkeypatch.setattr(module, "LONGEST_WRITE_S", 0.1)
    monkeypatch.setattr(module.log, "error", lambda *_: named.set())
    with pytest.raises(BankTimeout, match="does not answer"):
        w.run_attempt(w.engine())
    assert named.is_set()
