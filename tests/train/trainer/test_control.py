"""Waiting for a batch: rounds that no collective's time-out ends, and a clock that only progress stops."""

import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from dppo_megatron.common.ranks import Ranks
from dppo_megatron.train.trainer import control as module
from dppo_megatron.train.trainer.control import BatchTimeout, Control


class Source:
    """Ready when `count` groups have arrived, one every `every` seconds."""

    def __init__(self, count: int, every: float):
        self._count, self._every, self._started = count, every, time.monotonic()

    def _arrived(self) -> int:
        return int((time.monotonic() - self._started) / self._every)

    def ready(self, step: int) -> bool:
        return self._arrived() >= self._count

    def progress(self) -> str:
        return f"{self._arrived()} groups"


@pytest.fixture
def decisions(monkeypatch) -> list[int]:
    """The decisions that rank 0 of two sends to the other."""
    sent: list[int] = []

    class RankZero(Ranks):
        def __init__(self, timeout_s: float):
            super().__init__(timeout_s, place=(dist.HashStore(), 0, 2))

        def from_rank_zero(self, make, what):
            sent.append(super().from_rank_zero(make, what))
            return sent[-1]

    monkeypatch.setattr(module, "Ranks", RankZero)
    monkeypatch.setattr(module, "ROUND_S", 0.05)
    return sent


def test_progress_goes_on_for_longer_than_the_stall_timeout(decisions):
    assert Control(stall_timeout_s=0.3).wait_until_ready(Source(6, 0.1), 0)
    assert decisions[-1] == module.GO
    assert decisions.count(module.WAIT) > 2


def test_the_stall_clock_goes_on_over_rounds(decisions):
    with pytest.raises(BatchTimeout, match="nothing new arrived"):
        Control(stall_timeout_s=0.3).wait_until_ready(Source(6, 1e9), 0)
    assert module.WAIT in decisions


def test_an_engine_that_lags_ends_the_wait(decisions, monkeypatch):
    monkeypatch.setattr(module, "LAG_S", 0.0)
    publisher = SimpleNamespace(engines_lag=lambda: True)
    assert not Control(stall_timeout_s=0.3).wait_until_ready(Source(1, 1e9), 0, publisher)
