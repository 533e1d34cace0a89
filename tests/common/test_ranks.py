"""One rank acts for all, or all act; an error is raised on every rank, and a rank that does not come is reported."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dppo_megatron.common.ranks import Ranks, RanksTimeout
from dppo_megatron.config import ConfigError
from tests.support import ranks as support


def _fail(rank: int, who: tuple[int, ...]) -> int:
    if rank in who:
        raise ConfigError(f"config of rank {rank}", ["lr: missing"])
    return 10 * rank


def _error(call) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""


def _scenarios(rank: int, directory: Path) -> dict[str, Any]:
    store = dist.FileStore(str(directory / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    own, default = Ranks(timeout_s=60), Ranks()
    results: dict[str, Any] = {
        "from_rank_zero": own.from_rank_zero(lambda: {"from": rank}, "a value"),
        "gather": default.gather(rank, "numbers"),
        "on_every_rank": own.on_every_rank(lambda: _fail(rank, ()), "work"),
        "rank_zero_fails": _error(lambda: own.from_rank_zero(lambda: _fail(rank, (0,)), "a value")),
        "rank_one_fails": _error(lambda: default.on_every_rank(lambda: _fail(rank, (1,)), "work")),
        "both_fail": _error(lambda: own.on_every_rank(lambda: _fail(rank, (0, 1)), "work")),
    }
    own.barrier("the other")
    short = Ranks(timeout_s=5)  # it is made within that, too
    if rank == 1:
        started = time.monotonic()
        results["late"] = _error(lambda: short.from_rank_zero(lambda: 1, "the engines to sleep"))
        results["waited_s"] = time.monotonic() - started
        (directory / "late").touch()
    while not (directory / "late").exists():
        time.sleep(0.05)  # rank 0 does not come
    dist.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    with support.Ranks(2) as started:
        return started.run(_scenarios, directory=tmp_path_factory.mktemp("ranks"))


def test_every_rank_has_what_the_others_have(ranks):
    for got in ranks:
        assert got["from_rank_zero"] == {"from": 0}
        assert got["gather"] == [0, 1]
        assert got["on_every_rank"] == [0, 10]


def test_an_error_of_rank_zero_is_raised_on_all_with_its_type(ranks):
    assert ranks[0]["rank_zero_fails"] == ranks[1]["rank_zero_fails"]
    kind, text = ranks[1]["rank_zero_fails"]
    assert kind == "ConfigError"
    assert "config of rank 0" in text
    assert "lr: missing" in text


def test_errors_of_any_rank_are_raised_on_all_with_every_reason(ranks):
    assert ranks[0]["rank_one_fails"] == ranks[1]["rank_one_fails"]
    kind, text = ranks[0]["rank_one_fails"]
    assert kind == "ConfigError"
    assert text.startswith("rank 1: ConfigError: config of rank 1")
    assert "rank 0" not in text
    for got in ranks:
        assert "rank 0: ConfigError: config of rank 0" in got["both_fail"][1]
        assert "rank 1: ConfigError: config of rank 1" in got["both_fail"][1]


def test_a_rank_that_does_not_come_is_reported_with_what_was_waited_for(ranks):
    kind, text = ranks[1]["late"]
    assert kind == RanksTimeout.__name__
    assert "rank 1 waited 5 s for the engines to sleep: another rank ended or was too late" in text
    assert 4 < ranks[1]["waited_s"] < 60


def test_one_process_needs_no_process_group():
    alone = Ranks(timeout_s=1)
    assert (alone.rank, alone.size) == (0, 1)
    assert alone.from_rank_zero(lambda: 3, "a value") == 3
    assert alone.gather(4, "numbers") == [4]
    alone.barrier("nobody")
    with pytest.raises(ConfigError, match="rank 0: ConfigError: config of rank 0"):
        alone.on_every_rank(lambda: _fail(0, (0,)), "work")
