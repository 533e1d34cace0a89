import os

import pytest

from dppo_megatron.common.files import DamagedFile
from dppo_megatron.observability.logs import last_lines
from dppo_megatron.observability.tail import JsonlFollower, read_metrics, read_records


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_follower_returns_each_record_once_and_waits_for_the_newline(path):
    follower = JsonlFollower(path)
    assert follower.poll() == ([], False)
    for text, records in (('{"step": 1}\n{"step": ', [{"step": 1}]), ("", []), ("2}\n", [{"step": 2}]), ("", [])):
        with path.open("a") as file:
            file.write(text)
        assert follower.poll() == (records, False)


def replaced(path):
    new = path.with_name("new")
    new.write_text('{"step": 1}\n{"step": 2, "again": 1}\n')
    new.replace(path)


def removed(path):
    path.rename(path.with_name("metrics.1.jsonl"))


@pytest.mark.parametrize(
    ("before", "change", "polls"),
    [
        ('{"step": 1}\n{"step": 2}\n', replaced, [([{"step": 1}, {"step": 2, "again": 1}], True), ([], False)]),
        ('{"step": 1}\n{"step": 2}\n', lambda path: os.truncate(path, 12), [([{"step": 1}], True)]),
        ('{"step": 1}\n{"st', lambda path: path.write_text('{"step": 1}\n{"step": 2}\n'), [([{"step": 2}], False)]),
        ('{"step": 1}\n', removed, [([], False)]),
    ],
    ids=["replaced by a longer file", "cut", "an incomplete line replaced", "removed"],
)
def test_follower_starts_again_when_the_file_is_a_new_one(path, before, change, polls):
    path.write_text(before)
    follower = JsonlFollower(path)
    follower.poll()
    change(path)
    assert [follower.poll() for _ in polls] == polls
    if not path.exists():
        path.write_text('{"step": 1}\n')
        assert follower.poll() == ([{"step": 1}], True)


def test_read_records_skips_what_is_not_a_record(path):
    assert read_records(path) == []
    path.write_bytes(b'{"step": 1}\n\x00\x00\xff\n[1]\n{"step": 2}\n{"step": 3}')
    assert read_records(path) == [{"step": 1}, {"step": 2}]


def test_readers_of_metrics_get_steps_and_numbers_whatever_a_file_holds(path):
    sound = b'{"step": 2, "time": 1.5, "train/loss": 0.5, "eval/accuracy": null, "train/lr": NaN}\n'
    foreign = [b'{"step": "1"}', b'{"step": true}', b'{"step": -1}', b'{"step": 1e9}', b'{"step": %d}' % 10**20, b"{}"]
    spoiled = b'{"step": 3, "time": "now", "a": "x", "b": [1], "c": true, "e": 1e300}\n'
    path.write_bytes(b"\n".join([*foreign, b"[" * 10**5, sound + spoiled]))
    expected = [{"step": 2, "time": 1.5, "train/loss": 0.5, "eval/accuracy": None, "train/lr": None},
                {"step": 3, "e": None}]  # fmt: skip
    assert read_metrics(path) == expected
    assert JsonlFollower(path).poll() == (expected, False)


def test_what_is_no_file_is_neither_waited_for_nor_read_for_ever(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "device", "."):
        with pytest.raises(DamagedFile, match="not a regular file"):
            read_metrics(tmp_path / name)
    assert last_lines(tmp_path / "pipe") == []
