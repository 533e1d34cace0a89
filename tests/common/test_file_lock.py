"""Locks of files, where the file system has none, and what an error says about the holder."""

import errno
import fcntl
import json
import socket

import psutil
import pytest

from dppo_megatron.common.file_lock import FileLock, LockHeld


def test_only_a_lock_that_is_not_needed_may_be_absent(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with FileLock(tmp_path / "a", needed=False), pytest.raises(OSError, match="No locks available"):
        FileLock(tmp_path / "b")


@pytest.mark.parametrize("here", [True, False])
def test_a_holder_has_ended_only_if_it_ran_on_this_host(tmp_path, monkeypatch, here):
    monkeypatch.setattr(psutil, "pid_exists", lambda pid: False)
    with FileLock(tmp_path / "lock"):
        host = socket.gethostname() if here else "elsewhere"
        (tmp_path / "lock").write_text(json.dumps({"pid": 7, "host": host, "since": "today"}))
        with pytest.raises(LockHeld, match=f"process 7 on {host} since today") as held:
            FileLock(tmp_path / "lock")
    assert held.value.ended == here
