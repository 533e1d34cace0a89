"""No written group is lost: killed writers, begun segments, cut tails, full disks, damaged files, second writers."""

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest

from dppo_megatron.bank import BankCorruption, BankLocked, BankReader, BankWriteError, BankWriter
from dppo_megatron.bank.files import Head
from tests.support import bank
from tests.support.bank import append, as_killed, assert_same_group, files, fill, flip, make_group, whole_groups


@pytest.mark.parametrize(("write", "share"), [(0, 0.0), (0, 0.5), (0, 1.0), (1, 0.0), (1, 0.5), (1, 1.0)])
def test_a_writer_killed_in_the_middle_of_a_record(tmp_path, write, share):
    """SIGKILL after part of the blob (write 0) or index line (write 1) of group 5, second of its segment."""
    program = f"""
        import os, signal, sys
        from tests.support.bank import make_group
        from dppo_megatron.bank import BankWriter
        writer = BankWriter({str(tmp_path)!r}, 4)
        for p in range(5):
            writer.append(make_group(p))
        real, calls = os.pwritev, []
        def pwritev(descriptor, buffers, offset):
            data = b"".join(buffers)
            calls.append(offset)
            if len(calls) <= {write}:
                return real(descriptor, [data], offset)
            real(descriptor, [data[: int(len(data) * {share})]], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        os.pwritev = pwritev
        writer.append(make_group(5))
    """
    process = subprocess.run([sys.executable, "-c", textwrap.dedent(program)])
    assert process.returncode == -signal.SIGKILL
    whole = 6 if (write, share) == (1, 1.0) else 5
    assert len(bank.read_all(tmp_path)) == whole
    with BankWriter(tmp_path, 4) as writer:
        assert writer.done_positions() == set(range(whole))
        append(writer, range(whole, 7))
    assert whole_groups(tmp_path) == 7
    reader = BankReader(tmp_path)
    stored = sum(entry.size for entry in reader.entries(0, reader.refresh()))
    assert sum(path.stat().st_size for path in tmp_path.glob("*.bin")) == stored


def test_every_incomplete_index_line_is_truncated(tmp_path, caplog):
    fill(tmp_path / "whole", 2)
    as_killed(tmp_path / "whole")
    data, index = files(tmp_path / "whole", 0)
    lines = index.read_bytes().splitlines(keepends=True)
    for kept in (0, 1, 17, len(lines[2]) - 1):
        directory = tmp_path / f"incomplete-{kept}"
        shutil.copytree(tmp_path / "whole", directory)
        _, incomplete = files(directory, 0)
        incomplete.write_bytes(lines[0] + lines[1] + lines[2][:kept])
        assert len(bank.read_all(directory)) == 1, "a reader must not take half a line"
        caplog.clear()
        with caplog.at_level(logging.WARNING), BankWriter(directory, 3) as writer:
            assert writer.done_positions() == {0}
            assert "truncated a record" in caplog.text
            writer.append(make_group(1))
        assert whole_groups(directory) == 2
        assert files(directory, 0)[0].stat().st_size == data.stat().st_size


def shorten(data, _index, _entries):
    os.truncate(data, data.stat().st_size - 1)


def change(data, _index, _entries):
    flip(data, -3)


def zero_lines(_data, index, _entries):
    *lines, group, dropped = index.read_bytes().splitlines(keepends=True)
    index.write_bytes(b"".join(lines) + bytes(len(group) + len(dropped)))


def zero_a_page(_data, index, _entries):
    """The last line is kept from its second page on."""
    *lines, group, _dropped = index.read_bytes().splitlines(keepends=True)
    index.write_bytes(b"".join(lines) + bytes(100) + group[100:])


def cut(data, _index, entries):
    os.truncate(data, entries[2].offset + 10)


def zero_data(data, _index, entries):
    """The file may keep its length, with zeros where data is gone, and the first of the records its header."""
    kept = data.read_bytes()[: entries[3].offset - 8]
    data.write_bytes(kept + bytes(data.stat().st_size - len(kept)))


@pytest.mark.parametrize(
    ("damage", "left"), [(shorten, 3), (change, 3), (zero_lines, 3), (zero_a_page, 3), (cut, 2), (zero_data, 2)]
)
def test_a_tail_lost_in_a_power_failure_is_truncated(tmp_path, caplog, damage, left):
    """Without a flush per record, a power failure can take data of several records and leave their lines."""
    with BankWriter(tmp_path, 5, fsync=False) as writer:
        append(writer, range(4))
        writer.drop(9, 0, "aborted")
    as_killed(tmp_path)
    reader = BankReader(tmp_path)
    damage(*files(tmp_path, 0), reader.entries(0, reader.refresh()))
    with caplog.at_level(logging.WARNING), BankWriter(tmp_path, 5) as writer:
        assert "truncated a record" in caplog.text
        assert writer.done_positions() == set(range(left))
        writer.append(make_group(left))
    assert whole_groups(tmp_path) == left + 1


def test_a_damaged_group_before_a_whole_one_is_refused(tmp_path):
    fill(tmp_path, 3)
    data = files(tmp_path, 0)[0]
    flip(data, 40)
    content = data.read_bytes()
    with pytest.raises(
        BankCorruption, match=r"line 2 of .*: its data does not match its checksum, yet that of line 3 is"
    ):
        BankWriter(tmp_path, 3)
    assert data.read_bytes() == content


def test_whole_files_are_not_touched_on_opening(tmp_path, caplog):
    fill(tmp_path, 4)
    before = {path: path.read_bytes() for path in tmp_path.glob("segment-*")}
    with caplog.at_level(logging.WARNING):
        BankWriter(tmp_path, 3).close()
    assert before == {path: path.read_bytes() for path in tmp_path.glob("segment-*")}
    assert not caplog.records


def test_a_crash_between_the_files_of_a_new_segment_is_repaired(tmp_path):
    fill(tmp_path, 3)
    files(tmp_path, 1)[0].write_bytes(b"half a blob")
    fill(tmp_path, 2, start=3)
    assert [g.prompt.position for g in bank.read_all(tmp_path)] == [0, 1, 2, 3, 4]


def test_a_record_is_whole_though_one_read_does_not_give_all_of_it(tmp_path, monkeypatch, caplog):
    """One call reads 2 GiB at most."""
    fill(tmp_path, 2)
    as_killed(tmp_path)
    pread, preadv = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda file, size, offset: pread(file, min(size, 100), offset))
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: preadv(file, [buffers[0][:100]], offset))
    with BankWriter(tmp_path, 3) as writer:
        assert writer.num_train_groups == 2
    assert not caplog.records


def test_damage_before_whole_records_is_refused_not_truncated(tmp_path):
    fill(tmp_path, 3)
    index = files(tmp_path, 0)[1]
    lines = index.read_bytes().splitlines(keepends=True)
    index.write_bytes(lines[0] + lines[1] + b"#" * (len(lines[2]) - 1) + b"\n" + lines[3])
    for opened in (lambda: BankWriter(tmp_path, 3), lambda: BankReader(tmp_path).refresh()):
        with pytest.raises(BankCorruption, match=r"segment-000000\.jsonl: line 3: damaged: its crc32 does not match"):
            opened()


def test_old_data_may_be_deleted(tmp_path):
    fill(tmp_path, 7)
    files(tmp_path, 0)[0].unlink()
    fill(tmp_path, 2, start=7)
    reader = BankReader(tmp_path)
    assert reader.refresh() == 9
    assert_same_group(reader.read(reader.entries(8, 9)[0]), make_group(8))
    with pytest.raises(BankCorruption, match=r"segment-000000\.bin: group 0 .*gone"):
        reader.read(reader.entries(0, 1)[0])


def test_a_flipped_bit_is_named(tmp_path):
    fill(tmp_path, 5)
    reader = BankReader(tmp_path)
    reader.refresh()
    entry = reader.entries(4, 5)[0]
    data = files(tmp_path, 1)[0]
    flip(data, entry.offset + entry.size // 2, by=16)
    with pytest.raises(
        BankCorruption, match=r"segment-000001\.bin: group 4 \(line 3 of segment-000001\.jsonl.*checksum"
    ):
        reader.read(entry)
    assert_same_group(reader.read(reader.entries(3, 4)[0]), make_group(3))
    os.truncate(data, entry.offset + 5)
    with pytest.raises(BankCorruption, match=f"the prompt: only 5 of {entry.front[0]} bytes"):
        reader.read(entry)


def test_an_index_that_shrinks_under_a_reader_is_an_error(tmp_path):
    fill(tmp_path, 2)
    reader = BankReader(tmp_path)
    reader.refresh()
    os.truncate(files(tmp_path, 0)[1], 10)
    with pytest.raises(BankCorruption, match="shorter than when last read"):
        reader.refresh()


def test_one_writer_at_a_time(tmp_path):
    writer = BankWriter(tmp_path, 3)
    with pytest.raises(BankLocked, match=f"process {os.getpid()} on .* since"):
        BankWriter(tmp_path, 3)
    writer.append(make_group(0))
    writer.close()
    program = f"""
        from dppo_megatron.bank import BankWriter
        writer = BankWriter({str(tmp_path)!r}, 5)
        print("open", flush=True)
        input()
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        with pytest.raises(BankLocked, match=f"process {process.pid} on"):
            BankWriter(tmp_path, 3)
    finally:
        process.kill()
        process.communicate()
    BankWriter(tmp_path, 3).close()


def refusal(call, *arguments) -> BankWriteError | None:
    try:
        call(*arguments)
    except BankWriteError as error:
        return error
    return None


def test_a_full_disk_loses_nothing(small_disk):
    bank, ballast = small_disk / "bank", small_disk / "ballast"
    ballast.write_bytes(bytes(100_000))
    reader = BankReader(bank)
    with BankWriter(bank, 1000) as writer:
        written = 0
        while (error := refusal(writer.append, make_group(written, longest=500))) is None:
            written += 1
        assert error.errno == errno.ENOSPC
        message = str(error)
        assert "segment-000000.bin" in message
        assert " bytes free" in message
        assert "run.dir" in message
        assert written > 3
        assert reader.refresh() == written == writer.num_train_groups
        data, index = files(bank, 0)
        assert data.stat().st_size == sum(entry.size for entry in reader.entries(0, written)), "not rolled back"
        assert index.read_bytes().endswith(b"\n")
        with pytest.raises(BankWriteError):
            writer.append(make_group(written, longest=500))
        ballast.unlink()
        assert writer.append(make_group(written, longest=500)) == written
    reader.refresh()
    for p, entry in enumerate(reader.entries(0, written + 1)):
        assert_same_group(reader.read(entry), make_group(p, longest=500))


def test_a_disk_full_for_the_index_or_the_next_segment(small_disk):
    """Fills the disk to the last page, so that index lines and new segments fail too."""
    with BankWriter(small_disk / "bank", 2) as writer:
        written, refused = 0, 0
        while refused < 3:
            error = refusal(writer.drop, written, 0, "aborted", "x" * 3000)
            if error is None:
                written += 1
            else:
                assert error.errno == errno.ENOSPC
                refused += 1
    with BankWriter(small_disk / "bank", 2) as writer:
        assert writer.done_positions() == set(range(written))


def test_a_failing_flush_of_the_index_stops_the_writer(tmp_path, monkeypatch):
    # A device that accepts a write and then fails to flush it cannot be had without special hardware.
    writer = BankWriter(tmp_path, 3, fsync=True)
    writer.append(make_group(0))
    real, calls = os.fdatasync, []

    def flush(descriptor):
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", flush)
    with pytest.raises(BankWriteError, match="may not survive"):
        writer.append(make_group(1))
    with pytest.raises(BankWriteError, match="restart"):
        writer.append(make_group(2))
    writer.close()
    with BankWriter(tmp_path, 3) as writer:
        assert writer.done_positions() == {0, 1}


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
    assert len(bank.read_all(tmp_path)) == 3 * segment
    with BankWriter(tmp_path, 3) as writer:
        append(writer, range(3 * segment, 3 * segment + 2))
        assert whole_groups(tmp_path) == 3 * segment + 2  # by a trainer beside it


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
        append(writer, range(3))
    assert named == [True] * 4
