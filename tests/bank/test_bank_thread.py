"""Groups are written in a thread of the writer's own."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace

import pytest

from dppo_megatron.bank import BankLocked, BankWriter
from tests.support.bank import make_group


def test_an_event_loop_goes_on_while_a_group_is_written(tmp_path, monkeypatch):
    """Two writes of 0.25 s a group do not block the loop."""
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *call: (time.sleep(0.25), real(*call))[1])

    async def main() -> tuple[float, list[int]]:
        longest = 0.0
        with BankWriter(tmp_path, 4) as writer:
            last = time.monotonic()
            writes = [asyncio.wrap_future(writer.begin_append(make_group(p))) for p in range(3)]
            assert (writer.num_train_groups, writer.num_begun_groups) == (0, 3)
            while not all(write.done() for write in writes):
                await asyncio.sleep(0.001)
                longest, last = max(longest, time.monotonic() - last), time.monotonic()
            assert writer.num_train_groups == 3
            return longest, [write.result() for write in writes]

    longest, numbers = asyncio.run(main())
    assert numbers == [0, 1, 2]
    assert longest < 0.24


def test_a_group_that_fails_in_the_writers_thread_leaves_its_position_free(tmp_path):
    broken = replace(make_group(1), temperature=0.0)
    with BankWriter(tmp_path, 4) as writer:
        futures = [writer.begin_append(g) for g in (make_group(0), broken, make_group(2))]
        with pytest.raises(ValueError, match="position 2 is already"):
            writer.begin_append(make_group(2))
        assert futures[0].result() == 0
        with pytest.raises(ValueError, match="temperature"):
            futures[1].result()
        assert futures[2].result() == 1
        assert writer.num_begun_groups == writer.num_train_groups == 2
        assert writer.done_positions() == {0, 2}
        assert writer.append(make_group(1)) == 2


def test_a_group_that_the_lock_forbids_does_not_count(tmp_path):
    with BankWriter(tmp_path, 4) as writer:
        writer.append(make_group(0))
        lock = tmp_path / "writer.lock"
        lock.rename(tmp_path / "aside")
        with pytest.raises(BankLocked, match="is gone"):
            writer.append(make_group(1))
        assert writer.num_begun_groups == writer.num_train_groups == 1
        assert writer.done_positions() == {0}
        (tmp_path / "aside").rename(lock)
        assert writer.append(make_group(1)) == 1
