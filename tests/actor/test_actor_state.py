"""Checkpoints behind training, loading in another layout, memory on the host, precision."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from dppo_megatron.actor.checkpoint.directory import CheckpointError
from dppo_megatron.actor.checkpoint.writer import BackgroundWrite, HostFiles
from dppo_megatron.actor.offload import host_pieces
from tests.actor.scenarios import state as scenarios
from tests.support.actor_cases import actor_config, sequences
from tests.support.actor_ranks import run_scenario
from tests.support.ranks import fork_server


@pytest.mark.parametrize("size", [1, 2])
def test_a_checkpoint_is_written_while_training_goes_on(on, size):
    value = on(size, scenarios.asynchronous)
    assert value["while_writing"] == ("step-000001", True)
    assert value["after"] == ("step-000002", ["latest", "step-000002"])
    assert value["state"] == {"step": 2}
    assert value["equal"]


def test_a_rank_that_cannot_write_stops_all_and_keeps_the_last_good_one(on):
    value = on(2, scenarios.failing_write)
    assert "rank 1: OSError: [Errno 28] No space left on device" in value["error"]
    assert value["state"] == {"step": 1}


@pytest.mark.slow
def test_a_slow_disk_does_not_end_a_run(on):
    value = on(2, scenarios.slow_disk)
    assert min(value["took"].values()) > 1.5 * scenarios.LIMIT_S
    assert value["loaded"] == {"export": True, "save": True, "asynchronous": True}


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_memory_on_the_host_and_back_changes_no_bit(on, size):
    for layout, (held, freed, restored, equal) in on(size, scenarios.offloaded).items():
        assert held == 0, layout
        assert freed > 100_000, layout  # parameters, gradients, main parameters and moments of some 15,000 elements
        assert restored, layout
        assert equal, layout


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_optimizer_on_the_host_changes_no_bit(on, size):
    for layout, (held, state, equal) in on(size, scenarios.optimizer_on_host).items():
        assert held == 0, layout
        assert state > 100_000, layout
        assert equal, layout


def test_bf16_keeps_gradients_and_optimizer_in_fp32(on):
    value = on(1, scenarios.dtypes)
    assert value["parameters"] == {torch.bfloat16}
    assert value["gradients"] == value["main"] == value["states"] == {torch.float32}
    assert any("bf16 parameters and activations, fp32 gradients and optimizer" in line for line in value["log"])
    assert any("layers local, Adam torch" in line for line in value["log"])


@pytest.mark.parametrize("size", [1, 2])
def test_an_fp32_head_is_exact_to_fp32(on, size):
    value = on(size, scenarios.fp32_head)
    for model in ("qwen3", "tied"):
        (rounded, coarse, loss, norm), (exact, fine, wide_loss, wide_norm) = value[model, False], value[model, True]
        assert (rounded, exact) == ("torch.bfloat16", "torch.float32")
        assert fine < 1e-5 < coarse
        assert wide_loss == pytest.approx(loss, rel=0.05, abs=0.01)
        assert wide_norm == pytest.approx(norm, rel=0.05)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_batch_invariant_head_gives_a_row_the_same_bits_alone_and_in_a_pack(on, size):
    value = on(size, scenarios.batch_invariant_head)
    for (*case, invariant), (differing, loss, norm) in value.items():
        _, plain_loss, plain_norm = value[(*case, False)]
        coarse = "bf16" in case[2]
        assert loss == pytest.approx(plain_loss, rel=0.01 if coarse else 1e-5, abs=1e-3 if coarse else 1e-6), case
        assert norm == pytest.approx(plain_norm, rel=0.02 if coarse else 1e-5), case
        if invariant:
            assert not differing, case
    # What the setting is for.
    assert any(differing for (*_, invariant), (differing, *_) in value.items() if not invariant)


@pytest.mark.slow
def test_saved_in_one_layout_and_continued_in_another(on):
    for name, (expected, got) in on(2, scenarios.saved_elsewhere).items():
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-6, abs=1e-7), name
        assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5), name


@pytest.mark.slow
def test_every_rank_saves_its_share_of_buffers_with_many_buckets(on):
    for model, value in on(2, scenarios.many_buckets).items():
        assert value["buckets"] > 5, model
        assert value["equal"], model
        expected, got = value["elsewhere"]
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-6, abs=1e-6), model
        assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5), model
        assert min(value["written"]) > 0.4 * sum(value["written"]), model


def test_megatron_still_saves_buckets_with_padding_wrongly(on):
    """When this fails, the installed Megatron has mended it: see the head of `checkpoint/optimizer_shards.py`."""
    differing = on(1, scenarios.megatrons_own_shards)
    assert differing["one bucket"] == 0
    assert differing["many buckets"] > 0


@pytest.mark.parallel
def test_experts_behind_a_stage_without_them(ranks, models, tmp_path):
    assert run_scenario(ranks(4), scenarios.dense_stage_then_experts, models, tmp_path) == ({"step": 2}, True, True)


# ---- without Megatron


@pytest.mark.parametrize("nbytes", [1, 4096, (1 << 20) - 1, 1 << 20, 33_000_000_123, (1 << 35) + 5])
def test_pinned_memory_that_is_rounded_up_is_hardly_more(nbytes):
    sizes = host_pieces(nbytes)
    assert sum(sizes) == nbytes
    assert sum(1 << (size - 1).bit_length() for size in sizes) - nbytes < 1 << 20


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
    from types import SimpleNamespace

    from dppo_megatron.actor import Actor
    from dppo_megatron.trainer.checkpoints import Checkpoints

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
    deadline = time.monotonic() + 120
    while not (tmp_path / "half").exists():
        assert process.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert (tmp_path / "checkpoints" / "step-000002.tmp").exists()
    reader = fork_server().Process(target=_load, args=(models, tmp_path))
    reader.start()
    reader.join()
    assert (tmp_path / "loaded").read_text() == "{'step': 1}"


def _actor(models: Path, directory: Path):
    from dppo_megatron.actor import Actor, init_layout

    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    config = actor_config(models / "qwen3", sections={"checkpoint": {"asynchronous": True}})
    return Actor(config, init_layout(config))


def _stuck_while_writing(models: Path, directory: Path) -> None:
    from tests.actor.scenarios.parts import train

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
