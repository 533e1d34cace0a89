"""Versions are stored in a directory that only this run can reach, and are removed at its end."""

import os
import stat
from pathlib import Path

import pytest

from dppo_megatron.errors import ExpectedError
from dppo_megatron.run_dir import RunDir
from dppo_megatron.weights import place
from dppo_megatron.weights.place import OWNER, clear, lead, problem
from dppo_megatron.weights.published import PublishedPolicy


@pytest.fixture
def run(tmp_path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.make()
    return run


def publish(run: RunDir, version: int) -> None:
    run.weights_of(version).mkdir()
    (run.weights_of(version) / "model.safetensors").write_text("weights")
    PublishedPolicy(version, str(run.weights_of(version)), 0.0).write(run.published)


def test_only_the_owner_can_read_versions_in_memory_and_nothing_is_left(run, tmp_path):
    memory = tmp_path / "memory"
    lead(run, memory)
    publish(run, 3)
    lead(run, memory)  # a resume
    assert (memory / "v000003" / "model.safetensors").read_text() == "weights"
    assert stat.S_IMODE(memory.stat().st_mode) == 0o700
    clear(run)
    clear(run)
    assert not memory.exists()
    assert run.weights.is_dir()
    assert not run.weights.is_symlink()
    last = PublishedPolicy.read(run.published)
    assert (last.version, last.path) == (3, None)


def test_without_the_setting_it_is_a_directory_of_the_run(run):
    lead(run, None)
    publish(run, 1)
    lead(run, None)
    clear(run)
    assert run.weights_of(1).is_dir()


def test_the_setting_may_come_go_and_change_between_attempts(run, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for directory in (None, one, two, None, two):
        lead(run, directory)
        publish(run, 1)
        assert run.weights.resolve() == (directory or run.weights).resolve()
    assert not one.exists()


def test_a_memory_directory_that_a_reboot_removed_is_made_again(run, tmp_path):
    memory = tmp_path / "memory"
    lead(run, memory)
    (memory / OWNER).unlink()
    memory.rmdir()
    lead(run, memory)
    publish(run, 1)
    assert run.weights_of(1).is_dir()


def test_a_link_of_the_users_own_stays(run, tmp_path):
    storage = tmp_path / "storage"
    storage.mkdir()
    (storage / "theirs").touch()
    run.weights.symlink_to(storage)
    lead(run, None)
    clear(run)
    assert run.weights.resolve() == storage.resolve()
    lead(run, tmp_path / "memory")
    assert (storage / "theirs").exists()
    storage.rename(tmp_path / "elsewhere")
    clear(run)
    run.weights.rmdir()
    run.weights.symlink_to(storage)
    with pytest.raises(ExpectedError, match=r"links to .*/storage, which does not exist; remove the link"):
        lead(run, None)


def link(place: Path) -> None:
    place.with_name("target").mkdir(mode=0o700)
    place.symlink_to(place.with_name("target"))


def open_to_others(place: Path) -> None:
    place.mkdir()
    place.chmod(0o750)


def of_another_run(place: Path) -> None:
    place.mkdir(mode=0o700)
    (place / OWNER).write_text("/another/run")


def with_files(place: Path) -> None:
    place.mkdir(mode=0o700)
    (place / "thesis.tex").touch()


def replaceable(place: Path) -> None:
    place.parent.chmod(0o777)


UNFIT = {
    "a link": (link, "is a link or a file"),
    "a dangling link": (lambda place: place.symlink_to("nowhere"), "is a link or a file"),
    "a file": (lambda place: place.touch(), "is a link or a file"),
    "open to others": (open_to_others, "other users may read or write it"),
    "another run's": (of_another_run, "belongs to the run /another/run"),
    "with files": (with_files, "has files that no run wrote"),
    "replaceable": (replaceable, "any user may replace files in"),
    "nowhere": (lambda place: place.parent.rmdir(), "is not a directory; create it"),
}


@pytest.mark.parametrize("unfit", UNFIT)
def test_a_directory_that_others_could_reach_is_refused(run, tmp_path, unfit):
    parent = tmp_path / "memory"
    parent.mkdir()
    make, why = UNFIT[unfit]
    make(parent / "weights")
    before = sorted(parent.rglob("*")) if parent.exists() else []
    assert why in problem(run, parent / "weights")
    with pytest.raises(ExpectedError, match=r"weight_sync\.directory = "):
        lead(run, parent / "weights")
    assert (sorted(parent.rglob("*")) if parent.exists() else []) == before
    assert not run.weights.is_symlink()


def test_the_default_directory_and_one_of_another_user_are_refused(run, tmp_path, monkeypatch):
    assert "remove the setting" in problem(run, run.weights)
    (tmp_path / "memory").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert "it must be yours" in problem(run, tmp_path / "memory")


def test_a_run_that_is_quicker_keeps_the_directory(run, tmp_path, monkeypatch):
    def overtaken(run: RunDir, directory: Path) -> str | None:
        found = problem(run, directory)
        if not directory.exists():
            of_another_run(directory)
        return found

    monkeypatch.setattr(place, "problem", overtaken)
    with pytest.raises(ExpectedError, match="belongs to the run /another/run"):
        lead(run, tmp_path / "memory")
    assert not run.weights.is_symlink()


def test_a_file_that_holds_no_weights_is_not_removed(run, tmp_path):
    lead(run, tmp_path / "memory")
    (tmp_path / "memory" / "notes.txt").touch()
    with pytest.raises(ExpectedError, match=r"notes\.txt"):
        clear(run)
    assert (tmp_path / "memory" / "notes.txt").exists()
