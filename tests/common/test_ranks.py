"""One rank acts for all, or all act; an error is raised on every rank, and a rank that does not come is reported."""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from dppo_megatron.common import ranks as agreements
from dppo_megatron.common.local_store import world_store
from dppo_megatron.common.ranks import Ranks, RanksForged, RanksTimeout, authenticate
from dppo_megatron.config import Config, ConfigError
from tests.support import ranks as support
from tests.support.crafted import RunsCode


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


def _slow(ranks: Ranks, rank: int) -> int:
    """Rank 1 works for longer than the others may wait, and reports progress."""
    for _ in range(50 * rank):
        time.sleep(0.1)
        ranks.alive()
    return rank


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _scenarios(rank: int, directory: Path) -> dict[str, Any]:
    store = dist.FileStore(str(directory / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    before = _descriptors(), threading.active_count(), len(os.listdir("/proc/self/task"))
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
    results["added"] = (_descriptors(), threading.active_count(), len(os.listdir("/proc/self/task")))
    results["before"] = before
    large = own.gather(os.urandom(9 << 20) if rank else b"", "more than torch's store takes at once")
    results["large"] = [len(value) for value in large]
    patient = Ranks(timeout_s=2)
    results["slow"] = patient.on_every_rank(lambda: _slow(patient, rank), "slow work")
    short = Ranks(timeout_s=3)
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
        assert got["slow"] == [0, 1]
        assert got["large"] == [0, 9 << 20]
        assert got["added"] == got["before"], "agreements need no connections or threads of their own"


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
    assert "rank 1 waited 3 s for the engines to sleep: another rank ended or was too late" in text
    assert "missing: rank 0" in text
    assert 2 < ranks[1]["waited_s"] < 60


@pytest.mark.parametrize("signed_by", [None, b"", b"another run"])
def test_a_value_of_somebody_who_reached_the_store_is_not_unpickled(tmp_path, monkeypatch, signed_by):
    monkeypatch.setattr(agreements, "_secret", b"")  # as it was, afterwards
    store, forged = dist.HashStore(), zlib.compress(pickle.dumps((RunsCode(tmp_path / "ran"), None)))
    if signed_by is not None:
        monkeypatch.setattr(agreements, "_secret", signed_by)
        forged = Ranks(5, over=(store, 0, 2))._signature("0", forged) + forged
    authenticate("of this run")
    entry = dist.PrefixStore("agreements", store)
    entry.set("0/part-0", forged)
    entry.set("0", "1")
    with pytest.raises(RanksForged, match="rank 1: the store's value of 0 was not signed with this run's secret"):
        Ranks(5, over=(store, 1, 2)).from_rank_zero(dict, "a value")
    assert not (tmp_path / "ran").exists()


def test_a_value_of_an_earlier_attempt_is_refused_though_it_bears_the_runs_secret(monkeypatch):
    monkeypatch.setattr(agreements, "_secret", b"of this run")

    def attempt(store: dist.Store) -> list[Ranks]:
        ranks = [Ranks(5, over=(dist.PrefixStore("p", store), rank, 2)) for rank in range(2)]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(Ranks.begin_attempt, ranks))
        return ranks

    first, second = dist.HashStore(), dist.HashStore()
    before, now = attempt(first), attempt(second)
    with ThreadPoolExecutor(1) as pool:  # the value of rank 0 for the same agreement in both
        pool.submit(before[0].from_rank_zero, lambda: "old", "a value").result()
    for name in ("1", "1/part-0"):
        second.set(f"p/agreements/{name}", first.get(f"p/agreements/{name}"))
    with pytest.raises(RanksForged, match="rank 1: the store's value of 1 "):
        now[1].from_rank_zero(dict, "a value")
    assert before[1].from_rank_zero(dict, "a value") == "old"


def test_an_attempt_does_not_begin_with_the_values_of_another(monkeypatch):
    monkeypatch.setattr(agreements, "_secret", b"of this run")
    store = dist.HashStore()
    Ranks(5, over=(store, 0, 2))._set("0/all", [b"old", b"older"])
    with pytest.raises(RanksForged, match="rank 1: the store has values of an earlier attempt"):
        Ranks(5, over=(store, 1, 2)).begin_attempt()


def _of_this_process_alone() -> None:
    class Local(Exception):
        pass

    raise Local("in a word")


@pytest.mark.parametrize(
    ("act", "kind", "name", "text"),
    [
        (lambda: b"\xff".decode(), ValueError, "UnicodeDecodeError", "can't decode byte 0xff"),
        (lambda: Config.model_validate({"run": 3}), ValueError, "ValidationError", "validation errors for Config"),
        (_of_this_process_alone, Exception, "Local", "in a word"),
    ],
)
def test_an_error_that_others_cannot_make_is_told_all_the_same(act, kind, name, text):
    store = dist.HashStore()
    ranks = [Ranks(5, over=(dist.PrefixStore("world", store), rank, 2)) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        told = [pool.submit(of.from_rank_zero, act, "a value") for of in ranks]
        with pytest.raises(Exception, match=text):
            told[0].result()
        with pytest.raises(kind, match=rf"(?s)^{name}: .*{text}"):
            told[1].result()
        told = [pool.submit(of.on_every_rank, act, "an act") for of in ranks]
        for of in told:
            with pytest.raises(kind, match=rf"(?s)rank 0: .*{text}.*rank 1: .*{text}"):
                of.result()


def test_512_ranks_agree_over_the_connection_that_they_have():
    """An agreement of 512 simulated ranks adds no descriptor and takes about a second."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [Ranks(60, over=(dist.PrefixStore("world", store), rank, 512)) for rank in range(512)]
    before = _descriptors()

    def agree(of: Ranks) -> tuple[str, list[int]]:
        of.barrier("the others")
        return of.from_rank_zero(lambda: f"from {of.rank}", "a word"), of.gather(of.rank, "numbers")

    with ThreadPoolExecutor(512) as pool:
        results = list(pool.map(agree, ranks))
    assert results == [("from 0", list(range(512)))] * 512
    assert _descriptors() == before
    assert store.num_keys() <= 1  # torch's own


def test_the_store_of_one_node_listens_on_the_loopback_interface_only(monkeypatch):
    """torch's own listens on every interface."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    with ThreadPoolExecutor() as starting:
        first = starting.submit(world_store, timedelta(seconds=60))
        other = dist.TCPStore("127.0.0.1", port, 2, is_master=False, timeout=timedelta(seconds=60))
        first.result().set("a", "b")
    assert other.get("a") == b"b"
    listening = {c.laddr for c in psutil.Process().net_connections() if c.status == "LISTEN" and c.laddr.port == port}
    assert {address.ip for address in listening} == {"127.0.0.1"}
