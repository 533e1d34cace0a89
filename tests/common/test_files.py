"""Small files and directories are whole or not there, and on the device before they have their name."""

import errno
import os
from pathlib import Path

import pytest
import torch

from dppo_megatron.common.files import (
    DiskFull,
    SteadyFile,
    read_json,
    replace_directory,
    sync_tree,
    write_atomic,
    write_json,
)


@pytest.fixture
def calls(monkeypatch):
    """Every flush and rename, by the names they concern."""
    made = []
    sync, replace, rename = os.fsync, os.replace, os.rename

    def record_sync(descriptor):
        made.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record_sync)
    for name, act in {"replace": replace, "rename": rename}.items():
        monkeypatch.setattr(
            os, name, lambda a, b, act=act: (made.append(("rename", Path(a).name, Path(b).name)), act(a, b))
        )
    return made


def test_a_file_is_flushed_before_it_has_its_name_and_its_name_after(tmp_path, calls):
    write_atomic(tmp_path / "latest", "step-1")
    aside = f".latest.{os.getpid()}.tmp"
    assert calls == [("sync", aside), ("rename", aside, "latest"), ("sync", tmp_path.name)]
    assert (tmp_path / "latest").read_text() == "step-1"


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    write_atomic(tmp_path / "latest", "step-1")

    def fail(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DiskFull, match="No space left") as raised:
        write_atomic(tmp_path / "latest", b"step-2")
    assert raised.value.errno == errno.ENOSPC
    assert f" bytes free in {tmp_path}, at least 6 needed. Free space there" in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1
    with pytest.raises(DiskFull, match=f"{tmp_path}/shard: No space left"), SteadyFile(tmp_path / "shard", int) as file:
        file.write(bytes(6))
    (tmp_path / "shard").unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]
    assert (tmp_path / "latest").read_text() == "step-1"


@pytest.mark.parametrize("call", ["stat", "lstat"])
def test_a_file_that_is_removed_after_a_look_is_absent(tmp_path, monkeypatch, call):
    """As the registration of an engine that ends."""
    path, look = tmp_path / "engine-0.json", getattr(os, call)
    path.write_text('{"port": 1}')

    def look_and_remove(*arguments, **named):
        seen = look(*arguments, **named)
        path.unlink(missing_ok=True)
        return seen

    monkeypatch.setattr(os, call, look_and_remove)
    assert read_json(path) in (None, {"port": 1})


def test_json_comes_back_and_makes_its_directory(tmp_path):
    path = tmp_path / "services" / "engine-0.json"
    assert read_json(path) is None
    write_json(path, {"port": 1})
    assert read_json(path) == {"port": 1}


@pytest.mark.parametrize("present", [False, True])
def test_a_directory_takes_the_name_of_another(tmp_path, calls, present):
    source, target = tmp_path / "new", tmp_path / "model"
    for directory, text in [(source, "new"), *([(target, "old")] if present else [])]:
        directory.mkdir()
        (directory / "weights").write_text(text)
    sync_tree(source)
    replace_directory(source, target)
    assert calls[:2] == [("sync", "new"), ("sync", "weights")]
    renames = [("rename", "model", ".model.replaced")] if present else []
    assert calls[2:5] == [*renames, ("rename", "new", "model"), ("sync", tmp_path.name)]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (target / "weights").read_text() == "new"


def test_torchs_writer_does_not_hide_a_full_disk():
    """It raises a RuntimeError of its own over the error of the file."""
    with pytest.raises(DiskFull, match="/dev/full: No space left"), SteadyFile(Path("/dev/full"), int) as file:
        torch.save(torch.zeros(1 << 20), file)
