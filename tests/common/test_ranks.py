"""One rank acts for all, or all act; an error is raised on every rank, and a rank that does not come is reported."""

import os
import pickle
import socket
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from dppo_megatron.common import ranks as agreements
from dppo_megatron.common.local_store import world_store
from dppo_megatron.common.ranks import Ranks, RanksForged, RanksTimeout, authenticate
from dppo_megatron.common.retry import wait_until
from dppo_megatron.config import Config, ConfigError
from tests.support import ranks as support
from tests.support.crafted import RunsCode


def _fail(rank: int, who: tuple[int, ...]) -> int:
    if rank in who:
        raise ConfigError(f"config of rank {rank}", ["lr: missing"])
    return 10 * rank


def _slow(ranks: Ranks, rank: int) -> int:
    """Rank 1 works for longer than the others may wait, and reports progress."""
    for _ in range(50 * rank):
        time.sleep(0.1)
        ranks.alive()
    return rank


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _agreements(rank: int, directory: Path) -> None:
    """Every rank has what the others have, and every error with its type and the reasons of all ranks."""
    store = dist.FileStore(str(directory / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))

    def threads() -> tuple[int, int, int]:
        return _descriptors(), threading.active_count(), len(os.listdir("/proc/self/task"))

    before = threads()
    own, default = Ranks(timeout_s=60), Ranks()
    assert own.from_rank_zero(lambda: {"from": rank}, "a value") == {"from": 0}
    assert default.gather(rank, "numbers") == [0, 1]
    assert own.on_every_rank(lambda: _fail(rank, ()), "work") == [0, 10]
    with pytest.raises(ConfigError, match=r"(?s)config of rank 0.*lr: missing"):
        own.from_rank_zero(lambda: _fail(rank, (0,)), "a value")
    with pytest.raises(ConfigError, match=r"^rank 1: ConfigError: config of rank 1") as one:
        default.on_every_rank(lambda: _fail(rank, (1,)), "work")
    assert "rank 0" not in str(one.value)
    both = r"(?s)rank 0: ConfigError: config of rank 0.*rank 1: ConfigError: config of rank 1"
    with pytest.raises(ConfigError, match=both):
        own.on_every_rank(lambda: _fail(rank, (0, 1)), "work")
    own.barrier("the other")
    assert threads() == before, "agreements need no connections or threads of their own"
    large = own.gather(os.urandom(9 << 20) if rank else b"", "more than torch's store takes at once")
    assert [len(value) for value in large] == [0, 9 << 20]
    patient = Ranks(timeout_s=2)
    assert patient.on_every_rank(lambda: _slow(patient, rank), "slow work") == [0, 1]
    dist.destroy_process_group()


def _late(rank: int, directory: Path) -> None:
    """Rank 0 does not come, which is reported with what was waited for."""
    store = dist.FileStore(str(directory / "late-store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    if rank == 1:
        started = time.monotonic()
        waited = "rank 1 waited 3 s for the engines to sleep: another rank ended or was too late.*missing: rank 0"
        with pytest.raises(RanksTimeout, match=f"(?s){waited}"):
            Ranks(timeout_s=3).from_rank_zero(lambda: 1, "the engines to sleep")
        assert 2 < time.monotonic() - started < 60
        (directory / "late").touch()
    assert wait_until((directory / "late").exists, timeout_s=120, poll_s=0.05)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [_agreements, _late])
def test_ranks_agree_and_report_every_error(tmp_path, scenario):
    with support.Ranks(2) as started:
        started.run(scenario, directory=tmp_path)


@pytest.mark.parametrize("signed_by", [None, b"", b"another run"])
def test_a_store_value_that_is_not_signed_with_the_secret_is_not_unpickled(tmp_path, monkeypatch, signed_by):
    monkeypatch.setattr(agreements, "_secret", b"")  # as it was, afterwards
    store, forged = dist.HashStore(), zlib.compress(pickle.dumps((RunsCode(tmp_path / "ran"), None)))
    if signed_by is not None:
        monkeypatch.setattr(agreements, "_secret", signed_by)
        forged = Ranks(5, place=(store, 0, 2))._signature("0", forged) + forged
    authenticate("of this run")
    entry = dist.PrefixStore("agreements", store)
    entry.set("0/part-0", forged)
    entry.set("0", "1")
    with pytest.raises(RanksForged, match="rank 1: the store's value of 0 was not signed with this run's secret"):
        Ranks(5, place=(store, 1, 2)).from_rank_zero(dict, "a value")
    assert not (tmp_path / "ran").exists()


def test_a_value_of_an_earlier_attempt_is_refused_though_it_bears_the_runs_secret(monkeypatch):
    monkeypatch.setattr(agreements, "_secret", b"of this run")

    def attempt(store: dist.Store) -> list[Ranks]:
        ranks = [Ranks(5, place=(dist.PrefixStore("p", store), rank, 2)) for rank in range(2)]
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
    Ranks(5, place=(store, 0, 2))._set("0/all", [b"old", b"older"])
    with pytest.raises(RanksForged, match="rank 1: the store has values of an earlier attempt"):
        Ranks(5, place=(store, 1, 2)).begin_attempt()


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
def test_an_error_that_other_ranks_cannot_construct_still_reaches_them(act, kind, name, text):
    store = dist.HashStore()
    ranks = [Ranks(5, place=(dist.PrefixStore("world", store), rank, 2)) for rank in range(2)]
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
    ranks = [Ranks(60, place=(dist.PrefixStore("world", store), rank, 512)) for rank in range(512)]
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
