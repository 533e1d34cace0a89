"""A killed or interrupted conversion continues where it stopped, and only if its input did not change."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from dppo_megatron.common.retry import wait_until
from dppo_megatron.convert import job
from dppo_megatron.convert.layout import TargetLayout
from dppo_megatron.convert.to_megatron import ToMegatron
from dppo_megatron.hf import ModelError
from tests.support.model_directories import edit_config, same_weights
from tests.support.runs import environment

# Stops in the middle of the third shard.
_SLOW = """
import sys, time
from dppo_megatron.convert import to_megatron
write = to_megatron.ToMegatron.write_shard
def slowly(self, index, path, tick):
    if index == 2:
        path.write_bytes(b"half of a shard")
        time.sleep(600)
    return write(self, index, path, tick)
to_megatron.ToMegatron.write_shard = slowly
from dppo_megatron.cli import main
sys.argv[1:1] = ["convert", "hf-to-megatron"]
main()
"""


@pytest.fixture
def interrupted(models, tmp_path, monkeypatch) -> tuple[Path, Path]:
    """A source, and a target with two of four shards written."""
    source = Path(shutil.copytree(models / "qwen3", tmp_path / "source"))
    write = ToMegatron.write_shard

    def fail(self, index, path, tick):
        if index == 2:
            path.write_bytes(b"half of a shard")
            raise KeyboardInterrupt
        return write(self, index, path, tick)

    with monkeypatch.context() as patched:
        patched.setattr(ToMegatron, "write_shard", fail)
        with pytest.raises(KeyboardInterrupt):
            job.convert(partial(ToMegatron, source, tmp_path / "target", TargetLayout(pipeline=4)))
    return source, tmp_path / "target"


@pytest.mark.slow
def test_killed_conversion_resumes_without_writing_finished_shards_again(models, tmp_path, convert):
    arguments = [str(models / "qwen3"), str(tmp_path / "target"), "--pipeline", "4"]
    process = subprocess.Popen([sys.executable, "-c", _SLOW, *arguments], env=environment())
    staging = tmp_path / ".target.writing"
    wait_until(lambda: list(staging.rglob("__2_0.distcp")), timeout_s=60, poll_s=0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(20)
    assert not (tmp_path / "target").exists()
    assert not (staging / "__2_0.distcp").exists()
    before = {file.name: file.stat().st_mtime_ns for file in staging.glob("__[01]_0.distcp")}
    assert len(before) == 2
    convert("hf-to-megatron", *arguments, "--resume")
    after = {name: (tmp_path / "target" / name).stat().st_mtime_ns for name in before}
    assert before == after
    assert not (tmp_path / "target" / ".conversion").exists()
    convert("megatron-to-hf", tmp_path / "target", tmp_path / "back")
    same_weights(models / "qwen3", tmp_path / "back")
    assert {p.name for p in tmp_path.iterdir()} == {"target", "back"}


def test_resuming_is_asked_for_and_refuses_other_settings_and_changed_sources(interrupted, convert):
    source, target = interrupted
    with pytest.raises(ModelError, match="was interrupted; continue with --resume"):
        convert("hf-to-megatron", source, target, "--pipeline", 4)
    with pytest.raises(ModelError, match="shards, layout changed"):
        convert("hf-to-megatron", source, target, "--pipeline", 2, "--resume")
    with pytest.raises(ModelError, match="dtype changed"):
        convert("hf-to-megatron", source, target, "--pipeline", 4, "--dtype", "fp32", "--resume")
    edit_config(source, initializer_range=0.1)
    with pytest.raises(ModelError, match="source changed"):
        convert("hf-to-megatron", source, target, "--pipeline", 4, "--resume")


def test_only_shards_that_are_not_whole_are_written_again(interrupted, convert, models, tmp_path):
    """Shard 0 shrank after its receipt, shard 1 is whole."""
    source, target = interrupted
    shards = [tmp_path / ".target.writing" / f"__{number}_0.distcp" for number in range(4)]
    assert [shard.exists() for shard in shards] == [True, True, False, False]
    shards[0].write_bytes(shards[0].read_bytes()[:100])
    before = shards[1].stat().st_mtime_ns
    convert("hf-to-megatron", source, target, "--pipeline", 4, "--resume")
    assert (target / shards[1].name).stat().st_mtime_ns == before
    convert("megatron-to-hf", target, tmp_path / "back")
    same_weights(models / "qwen3", tmp_path / "back")
    assert {path.name for path in tmp_path.iterdir()} == {"source", "target", "back"}
    assert not (target / ".conversion").exists()


def test_a_second_process_at_the_same_shard_cannot_damage_it(models, tmp_path, convert, monkeypatch):
    """A job may be submitted twice; only the first processes know of each other."""
    conversion = ToMegatron(models / "qwen3", tmp_path / "target", TargetLayout(pipeline=4))
    job.prepare(conversion, resume=False)
    write = ToMegatron.write_shard

    def late(self, index, path, tick):
        with path.open("wb") as file:
            monkeypatch.setattr(ToMegatron, "write_shard", write)
            job.run(conversion, job.ConversionWorker(1, 2))
            file.write(b"half of a shard")
        raise KeyboardInterrupt

    monkeypatch.setattr(ToMegatron, "write_shard", late)
    with pytest.raises(KeyboardInterrupt):
        job.run(conversion, job.ConversionWorker(1, 2))
    job.run(conversion, job.ConversionWorker(0, 2))
    convert("megatron-to-hf", tmp_path / "target", tmp_path / "back")
    same_weights(models / "qwen3", tmp_path / "back")
    assert {p.name for p in tmp_path.iterdir()} == {"target", "back"}


def test_resuming_while_the_first_still_runs_is_refused(models, tmp_path, monkeypatch):
    build = partial(ToMegatron, models / "qwen3", tmp_path / "target", TargetLayout(pipeline=4))
    write, refusals = ToMegatron.write_shard, []

    def meanwhile(self, index, path, tick):
        if index == 2:
            with pytest.raises(ModelError, match="another conversion is writing there") as refused:
                job.convert(build, resume=True, worker=job.ConversionWorker())
            refusals.append(refused)
        return write(self, index, path, tick)

    monkeypatch.setattr(ToMegatron, "write_shard", meanwhile)
    assert job.convert(build, worker=job.ConversionWorker()) is not None
    assert len(refusals) == 1


def test_a_resume_removes_the_directories_of_killed_processes(interrupted, convert, tmp_path):
    source, target = interrupted
    notes = tmp_path / ".target.writing" / ".conversion"
    assert not list(notes.glob("writing.*"))  # interrupted, not killed: it cleaned up
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    kinds = {"killed": ended.pid, "running": os.getpid()}
    left = {kind: notes / f"writing.{socket.gethostname()}.{pid}.x" for kind, pid in kinds.items()}
    for directory in left.values():
        directory.mkdir()
    job.prepare(ToMegatron(source, target, TargetLayout(pipeline=4)), resume=True)
    assert {kind for kind, directory in left.items() if directory.exists()} == {"running"}


@pytest.mark.parametrize("direction", ["hf-to-megatron", "hf-to-hf"])
def test_everything_is_on_the_disk_before_it_is_published(models, tmp_path, convert, monkeypatch, direction):
    synced, fsync, rename = set(), os.fsync, os.rename
    before = []

    def record(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def publish(source, target):
        before.append(set(synced))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(os, "rename", publish)
    convert(direction, models / "qwen3", tmp_path / "target")
    wanted = [tmp_path / "target", *(tmp_path / "target").rglob("*")]
    assert len(wanted) >= 5
    assert [path.name for path in wanted if path.stat().st_ino not in before[-1]] == []


def test_failure_of_another_process_is_reported_by_the_first(interrupted, monkeypatch, tmp_path):
    source, target = interrupted

    conversion = ToMegatron(source, target, TargetLayout(pipeline=4))
    notes = tmp_path / ".target.writing" / ".conversion"
    (notes / "failed.1").write_text("OSError: No space left on device")
    with pytest.raises(ModelError, match=r"process 1 of 2: OSError: No space left"):
        job.run(conversion, job.ConversionWorker(0, 2))
    (notes / "failed.1").unlink()
    monkeypatch.setattr(job, "_STALL_TIMEOUT_S", 0.3)
    with pytest.raises(ModelError, match=r"__3_0.distcp: waited for its process"):
        job.run(conversion, job.ConversionWorker(0, 2))


def test_a_worker_refuses_a_job_that_process_0_did_not_begin(interrupted, monkeypatch):
    source, target = interrupted

    other = ToMegatron(source, target, TargetLayout(pipeline=2))
    with pytest.raises(ModelError, match="changed since it was begun"):
        job.run(other, job.ConversionWorker(1, 2))
    monkeypatch.setattr(job, "_START_TIMEOUT_S", 0.2)
    elsewhere = ToMegatron(source, target.with_name("elsewhere"), TargetLayout(pipeline=2))
    with pytest.raises(ModelError, match="process 0 did not begin"):
        job.run(elsewhere, job.ConversionWorker(1, 2))


def test_processes_without_work_end_whenever_they_come(models, tmp_path, monkeypatch):

    monkeypatch.setattr(job, "_START_TIMEOUT_S", 0.2)
    build = partial(ToMegatron, models / "qwen3", tmp_path / "target", TargetLayout())
    assert job.convert(build, worker=job.ConversionWorker(1, 2)) is None  # nothing to write yet
    assert job.convert(build, worker=job.ConversionWorker(0, 2)) is not None
    assert job.convert(build, worker=job.ConversionWorker(1, 2)) is None  # after it has published
    four = partial(ToMegatron, models / "qwen3", tmp_path / "target", TargetLayout(pipeline=4))
    assert job.convert(four, worker=job.ConversionWorker(1, 2)) is None


def test_nproc_does_not_multiply_the_processes_of_torchrun(models, tmp_path, convert, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    convert("hf-to-megatron", models / "qwen3", tmp_path / "target", "--nproc", 4)
    assert not list(tmp_path.iterdir())


def test_which_worker_this_is(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "4")  # a batch script without srun: one process, whatever was allocated
    assert job.ConversionWorker.from_environment() == job.ConversionWorker(0, 1)
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert job.ConversionWorker.from_environment() == job.ConversionWorker(3, 4)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert job.ConversionWorker.from_environment() == job.ConversionWorker(1, 2)
