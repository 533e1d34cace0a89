"""A segment begins in two files: its begin line is on the device before head.json names it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from dppo_megatron.bank import BankWriter
from dppo_megatron.bank.files import Head
from tests.support.bank import assert_same_group, files, make_group, read_all


@pytest.mark.parametrize("segment", [0, 1])
def test_a_writer_killed_between_the_begin_line_and_the_head(tmp_path, segment):
    program = f"""
        import os, signal
        from tests.support.bank import fill
        from dppo_megatron.bank.files import Head
        write = Head.write
        def killed(head, directory):
            if head.segment == {segment}:
                os.kill(os.getpid(), signal.SIGKILL)
            write(head, directory)
        Head.write = killed
        fill({str(tmp_path)!r}, 4)
    """
    process = subprocess.run([sys.executable, "-c", textwrap.dedent(program)])
    assert process.returncode == -signal.SIGKILL
    assert len(read_all(tmp_path)) == 3 * segment
    with BankWriter(tmp_path, 3) as writer:
        for p in range(3 * segment, 3 * segment + 2):
            writer.append(make_group(p))
        for p, group in enumerate(read_all(tmp_path)):  # by a trainer beside it
            assert_same_group(group, make_group(p))
        assert p == 3 * segment + 1


def test_a_begin_line_is_on_the_device_before_the_head_names_its_segment(tmp_path, monkeypatch):
    """A power failure loses unflushed data; a named segment without a begin line is rejected."""
    flushed, real, write = {}, os.fdatasync, Head.write

    def fdatasync(descriptor):
        real(descriptor)
        flushed[os.readlink(f"/proc/self/fd/{descriptor}")] = os.fstat(descriptor).st_size

    named = []

    def check(head, directory):
        index = files(directory, head.segment)[1]
        named.append(flushed.get(str(index.resolve()), 0) >= len(index.read_bytes().splitlines(keepends=True)[0]))
        write(head, directory)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    monkeypatch.setattr(Head, "write", check)
    with BankWriter(tmp_path, 1, fsync=False) as writer:
        for p in range(3):
            writer.append(make_group(p))
    assert named == [True] * 4
