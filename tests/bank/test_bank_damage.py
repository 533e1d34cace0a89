"""Missing, foreign and read-only files are rejected in one clear sentence and never truncated."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dppo_megatron.bank import BankCorruption, BankError, BankLocked, BankReader, BankWriter
from dppo_megatron.bank import reader as bank_reader
from dppo_megatron.bank.audit import audit_bank
from dppo_megatron.bank.lines import dropped_line
from tests.support.bank import as_killed, files, fill, make_group, read_all


def test_a_writer_writes_nothing_after_its_lock_file_is_deleted(tmp_path):
    first = BankWriter(tmp_path, 3)
    first.append(make_group(0))
    (tmp_path / "writer.lock").unlink()
    with pytest.raises(BankLocked, match=r"writer\.lock: is gone, though this process has locked the bank"):
        first.append(make_group(1))
    assert first.num_begun_groups == first.num_train_groups == 1
    assert first.done_positions() == {0}
    with BankWriter(tmp_path, 3) as second:
        second.append(make_group(2))
        with pytest.raises(BankLocked, match=f"is another file now, of process {os.getpid()} on"):
            first.append(make_group(1))
        second.append(make_group(3))
        with pytest.raises(BankLocked):
            first.close()
    assert [g.prompt.position for g in read_all(tmp_path)] == [0, 2, 3]


def test_a_bank_that_cannot_be_written_to_is_one_clear_error(tmp_path):
    (tmp_path / "a-file").write_text("")
    (tmp_path / "bank" / "writer.lock").mkdir(parents=True)
    for directory, names in ((tmp_path / "a-file", "a-file: "), (tmp_path / "bank", r"writer\.lock: Is a directory")):
        with pytest.raises(BankError, match=f"{names}.*correct the permissions") as raised:
            BankWriter(directory, 1)
        assert raised.type is BankError
    (tmp_path / "segments").mkdir()
    (tmp_path / "segments" / "segment-000000.bin").mkdir()
    with pytest.raises(BankError, match=r"segment-000000\.bin: "):
        BankWriter(tmp_path / "segments", 1)


def test_a_read_only_file_system_is_one_clear_error(small_disk):
    fill(small_disk / "bank", 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(BankError, match=r"writer\.lock: Read-only file system; .*run.dir"):
        BankWriter(small_disk / "bank", 3)
    with pytest.raises(BankError, match=r"other: Read-only file system; .*run.dir"):
        BankWriter(small_disk / "other", 3)
    assert len(read_all(small_disk / "bank")) == 1


def test_files_of_other_names_are_not_the_banks(tmp_path):
    fill(tmp_path, 4)
    copied = files(tmp_path, 0)[1].read_bytes()
    for name in (
        "segment-000000 (copy).jsonl",
        "segment-7.jsonl",
        "segment-0000001.jsonl",
        "segment-.jsonl",
        "segment-1e3.jsonl",
    ):
        (tmp_path / name).write_bytes(copied)
    fill(tmp_path, 1, start=4)
    assert [g.prompt.position for g in read_all(tmp_path)] == list(range(5))


@pytest.mark.parametrize("suffix", ["bin", "jsonl"])
@pytest.mark.parametrize("killed", [False, True])
def test_a_missing_file_of_the_last_segment_is_refused(tmp_path, suffix, killed):
    fill(tmp_path, 5)
    if killed:
        as_killed(tmp_path)
    path = tmp_path / f"segment-000001.{suffix}"
    path.unlink()
    with pytest.raises(BankCorruption, match=rf"segment-000001\.{suffix}: missing"):
        BankWriter(tmp_path, 3)
    assert not path.exists()
    with pytest.raises(BankCorruption, match=rf"segment-000001\.{suffix}: (missing|group 3 .*gone)"):
        read_all(tmp_path)


def test_lines_that_went_missing_from_a_killed_writers_index_are_refused(tmp_path):
    """A crash can leave one group without a line, but not two."""
    fill(tmp_path, 3)
    as_killed(tmp_path)
    index = files(tmp_path, 0)[1]
    lines = index.read_bytes().splitlines(keepends=True)
    index.write_bytes(b"".join(lines[:2]))
    with pytest.raises(BankCorruption, match=r"segment-000000\.bin: .*the index has lost lines.*truncate -s \d+"):
        BankWriter(tmp_path, 3)
    index.write_bytes(b"".join(lines[:3]))
    with BankWriter(tmp_path, 3) as writer:
        assert writer.num_train_groups == 2


def test_a_damaged_file_of_a_closed_writer_is_refused_and_not_truncated(tmp_path):
    fill(tmp_path, 2)
    data, index = files(tmp_path, 0)
    whole = data.read_bytes(), index.read_bytes()
    for path, says in ((data, r"segment-000000\.bin: .*line 3"), (index, r"segment-000000\.jsonl: line 3: missing")):
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(BankCorruption, match=says):
            BankWriter(tmp_path, 3)
        data.write_bytes(whole[0])
        index.write_bytes(whole[1])
    fill(tmp_path, 1, start=2)
    assert len(read_all(tmp_path)) == 3


def test_a_segment_of_another_bank_is_refused(tmp_path):
    for name, start in (("a", 0), ("b", 50)):
        fill(tmp_path / name, 7, start)
    for number in (0, 1, 2):
        directory = Path(shutil.copytree(tmp_path / "a", tmp_path / f"mixed-{number}"))
        for path in files(tmp_path / "b", number):
            shutil.copy(path, directory)
        for opened in (lambda d=directory: BankWriter(d, 3), lambda d=directory: BankReader(d).refresh()):
            with pytest.raises(BankCorruption, match=rf"segment-00000{max(number, 1)}\.jsonl: line 1: does not follow"):
                opened()


def test_a_position_that_comes_twice_is_refused(tmp_path):
    fill(tmp_path, 2)
    as_killed(tmp_path)
    with files(tmp_path, 0)[1].open("ab") as index:
        index.write(dropped_line(1, 1, "no_signal", ""))
    for opened in (lambda: BankWriter(tmp_path, 3), lambda: BankReader(tmp_path).refresh()):
        with pytest.raises(
            BankCorruption, match=r"segment-000000\.jsonl: line 4: prompt position 1 is in the bank already"
        ):
            opened()


def test_a_reader_waits_for_late_bytes_of_a_line_only_on_a_network_file_system(tmp_path, monkeypatch):
    """A later page may arrive before an earlier one."""
    with BankWriter(tmp_path, 2) as writer:
        writer.append(make_group(0))
        reader = BankReader(tmp_path)
        assert reader.refresh() == 1
        writer.append(make_group(1))
        index = tmp_path / "segment-000000.jsonl"
        whole = index.read_bytes()
        first = whole.index(b"\n", whole.index(b"\n") + 1) + 1
        index.write_bytes(whole[:first] + bytes(40) + whole[first + 40 :])
        with pytest.raises(BankCorruption, match=r"line 3: damaged"):
            reader.refresh()
        monkeypatch.setattr(bank_reader, "is_local", lambda _: False)
        assert reader.refresh() == 1
        index.write_bytes(whole)
        assert reader.refresh() == 2
        index.write_bytes(whole[:first] + bytes(40) + whole[first + 40 :])
        late = BankReader(tmp_path)
        assert late.refresh() == 1
        monkeypatch.setattr(bank_reader, "LAG_S", 0.0)
        with pytest.raises(BankCorruption, match=r"line 3: damaged"):
            late.refresh()
        index.write_bytes(whole)


def test_a_bank_of_format_1_is_rejected_by_all_that_open_it(tmp_path):
    (tmp_path / "segment-000000.jsonl").write_bytes(
        b'{"kind":"group","position":0,"row":0,"offset":0,"bytes":8,"crc32":1,"n":1}\n'
    )
    (tmp_path / "segment-000000.bin").write_bytes(b"\0" * 8)
    for opened in (lambda: BankWriter(tmp_path, 3), lambda: BankReader(tmp_path).refresh()):
        with pytest.raises(BankError, match="bank format 1, this version reads only format 2; continue") as raised:
            opened()
        assert not isinstance(raised.value, BankCorruption)
    ((_, _, found),) = audit_bank(tmp_path)
    assert ["bank format 1" in problem for problem in found.problems] == [True]
    (tmp_path / "head.json").write_text('{"format": 2, "segment": 0}')
    with pytest.raises(BankCorruption, match="line 1: damaged: its crc32 does not match"):
        BankReader(tmp_path).refresh()
