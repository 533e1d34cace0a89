"""Checkpoints that are written behind training."""

import functools
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from dppo_megatron.common import files
from dppo_megatron.common.retry import wait_until
from dppo_megatron.train.actor.checkpoint.directory import CheckpointError
from dppo_megatron.train.actor.checkpoint.writer import BackgroundWrite, HostFiles
from tests.support.actor_cases import actor_config, sequences
from tests.support.actor_ranks import Rank, on_ranks
from tests.support.ranks import fork_server
from tests.train.actor.scenarios.parts import fingerprint, same, train

LIMIT_S = 4  # of a collective, and of a disk that takes nothing
ASYNCHRONOUS = {"checkpoint": {"asynchronous": True, "timeout_s": 30}}


@contextmanager
def gate() -> Iterator[threading.Event]:
    """Block every write of a checkpoint until the event is set."""
    opened, write = threading.Event(), HostFiles.write

    def wait_and_write(files, moved):
        assert opened.wait(30)
        write(files, moved)

    with mock.patch.object(HostFiles, "write", wait_and_write):
        yield opened


@on_ranks(1, 2)
def test_a_checkpoint_is_written_while_training_goes_on(rank: Rank):
    """It must contain the state at the time of the save."""
    directory = rank.directory / "checkpoints"
    latest = directory / "latest"
    parallel = {} if rank.world_size == 1 else {"tensor": 2}
    with rank.actor(sections=ASYNCHRONOUS, **parallel) as actor:
        train(actor, sequences(), updates=1)
        actor.save_checkpoint(directory, 1, {"step": 1}, keep=1)
        actor.finish_checkpoint()
        with gate() as opened:
            train(actor, sequences(), updates=1)
            bits = fingerprint(actor)
            actor.save_checkpoint(directory, 2, {"step": 2}, keep=1)
            train(actor, sequences(), updates=1)
            assert latest.read_text() == "step-000001"
            assert not same(bits, fingerprint(actor))
            opened.set()
            actor.finish_checkpoint()
        assert latest.read_text() == "step-000002"
        assert sorted(p.name for p in directory.iterdir()) == ["latest", "step-000002"]
    with rank.actor(**parallel) as actor:
        assert actor.load_checkpoint(directory) == {"step": 2}
        assert same(bits, fingerprint(actor))


@on_ranks(2)
def test_a_rank_that_cannot_write_stops_all_and_keeps_the_last_good_one(rank: Rank):
    """The next save raises on every rank."""
    directory = rank.directory / "checkpoints"
    full = OSError(28, "No space left on device") if rank.rank == rank.world_size - 1 else None
    with rank.actor(sections=ASYNCHRONOUS) as actor:
        actor.save_checkpoint(directory, 1, {"step": 1}, keep=1)
        actor.finish_checkpoint()
        with mock.patch.object(HostFiles, "write", side_effect=full) if full else nullcontext():
            actor.save_checkpoint(directory, 2, {"step": 2}, keep=1)
            with pytest.raises(CheckpointError, match=r"rank 1: OSError: \[Errno 28\] No space left on device"):
                actor.save_checkpoint(directory, 3, {"step": 3}, keep=1)
        assert actor.load_checkpoint(directory) == {"step": 1}


@pytest.mark.slow
@on_ranks(2)
def test_a_slow_disk_does_not_end_a_run(rank: Rank):
    """A disk that takes several times as long as a collective may: an export and checkpoints of both kinds."""
    from dppo_megatron.hf import save_hf

    sync = files.SteadyFile.sync
    waits = {"export": 0.3, "save": 0.1, "asynchronous": 0.1}  # for each part of a file
    for kind, pause in waits.items():

        def slowly(file, pause=pause if kind == "export" else pause * rank.rank):
            time.sleep(pause)
            sync(file)

        sections = {"checkpoint": {"asynchronous": kind == "asynchronous", "timeout_s": LIMIT_S}}
        with rank.actor(tensor=2, timeout_s=LIMIT_S, sections=sections) as actor:
            train(actor, sequences(), updates=1)
            started = time.monotonic()
            with mock.patch.object(files.SteadyFile, "sync", slowly), mock.patch.object(files, "FLUSH_BYTES", 4096):
                if kind == "export":
                    save_hf(actor.model_chunks, rank.directory / "hf", actor.config.model.path, shard_bytes=16 << 10)
                else:
                    actor.save_checkpoint(rank.directory / kind, 1, {"step": 1}, keep=1)
                    actor.finish_checkpoint()
            assert time.monotonic() - started > 1.5 * LIMIT_S, kind
            bits = fingerprint(actor)
            if kind == "export":
                actor.load_hf(rank.directory / "hf")
            else:
                actor.load_checkpoint(rank.directory / kind)
            assert same(bits, fingerprint(actor)), kind


# ---- without Megatron


def write_of(directory: Path, rank: int, complete=lambda: None, timeout_s: float = 20.0) -> BackgroundWrite:
    files = HostFiles()
    with files.create_stream(directory / f"{rank}.bin", "wb") as stream:
        stream.write(b"x")
    return BackgroundWrite(files, directory, rank, 2, complete, timeout_s)


def test_rank_zero_completes_only_when_all_have_written(tmp_path):
    partial = tmp_path / "partial"
    partial.mkdir()
    first = write_of(partial, 0, complete=lambda: partial.rename(tmp_path / "final"))
    time.sleep(0.3)
    assert partial.exists()
    second = write_of(partial, 1)
    first.wait()
    second.wait()
    assert sorted(p.name for p in (tmp_path / "final").iterdir()) == ["0.bin", "1.bin"]


def test_a_rank_that_never_comes_is_named(tmp_path):
    write = write_of(tmp_path, 0, timeout_s=0.5)
    with pytest.raises(CheckpointError, match=r"checkpoint.timeout_s.*ranks missing: 1"):
        write.wait()


def test_completion_may_come_while_a_rank_looks(tmp_path, monkeypatch):
    partial = tmp_path / "partial"
    partial.mkdir()

    def complete() -> None:
        if partial.exists():
            partial.rename(tmp_path / "final")

    def looks(look, path="."):
        complete()
        return look(path)

    for look in ("scandir", "listdir"):
        monkeypatch.setattr(os, look, functools.partial(looks, getattr(os, look)))
    later = threading.Timer(0.3, complete)
    later.start()
    write_of(partial, 1).wait()
    later.join()


def test_training_that_fails_leaves_the_checkpoint_in_flight_whole(tmp_path):
    from dppo_megatron.train.actor import Actor
    from dppo_megatron.train.trainer.checkpoints import Checkpoints

    partial = tmp_path / "partial"
    partial.mkdir()
    actor = SimpleNamespace(_writing=write_of(partial, 0, complete=lambda: partial.rename(tmp_path / "final")))
    actor.settle_checkpoint = lambda: Actor.settle_checkpoint(actor)
    config = SimpleNamespace(run=SimpleNamespace(dir=tmp_path))
    other = threading.Timer(0.3, write_of, (partial, 1))
    other.start()
    with pytest.raises(ZeroDivisionError), Checkpoints(config, actor):
        raise ZeroDivisionError
    assert (tmp_path / "final").exists()


def test_kill_9_while_writing_leaves_the_last_good_checkpoint(models, tmp_path):
    process = fork_server().Process(target=_stuck_while_writing, args=(models, tmp_path))
    process.start()
    wait_until(lambda: (tmp_path / "half").exists() or not process.is_alive(), timeout_s=120, poll_s=0.02)
    assert process.is_alive()
    assert (tmp_path / "half").exists()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert (tmp_path / "checkpoints" / "step-000002.tmp").exists()
    reader = fork_server().Process(target=_load, args=(models, tmp_path))
    reader.start()
    reader.join()
    assert (tmp_path / "loaded").read_text() == "{'step': 1}"


def _actor(models: Path, directory: Path):
    from dppo_megatron.train.actor import Actor, init_layout

    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    config = actor_config(models / "qwen3", sections={"checkpoint": {"asynchronous": True}})
    return Actor(config, init_layout(config))


def _stuck_while_writing(models: Path, directory: Path) -> None:
    actor = _actor(models, directory)
    actor.save_checkpoint(directory / "checkpoints", 1, {"step": 1}, keep=1)
    actor.finish_checkpoint()
    train(actor, sequences(), updates=1)

    def half(files: HostFiles, _moved: object) -> None:
        path, stream = next(iter(files._files.items()))
        content = b"".join(stream.drain())
        path.write_bytes(content[: len(content) // 2])
        (directory / "half").touch()
        time.sleep(600)

    HostFiles.write = half
    actor.save_checkpoint(directory / "checkpoints", 2, {"step": 2}, keep=1)
    time.sleep(600)


def _load(models: Path, directory: Path) -> None:
    actor = _actor(models, directory)
    (directory / "loaded").write_text(str(actor.load_checkpoint(directory / "checkpoints")))
