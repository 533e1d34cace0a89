from __future__ import annotations

import os

import pytest

from dppo_megatron.common.files import DamagedFile
from dppo_megatron.observability.logs import last_lines
from dppo_megatron.observability.tail import JsonlFollower, read_metrics, read_records


def append(path, text):
    with path.open("a") as file:
        file.write(text)


def test_follower_returns_each_record_once_and_waits_for_the_newline(tmp_path):
    path = tmp_path / "metrics.jsonl"
    follower = JsonlFollower(path)
    assert follower.poll() == ([], False)
    append(path, '{"step": 1}\n{"step": ')
    assert follower.poll() == ([{"step": 1}], False)
    assert follower.poll() == ([], False)
    append(path, "2}\n")
    assert follower.poll() == ([{"step": 2}], False)
    assert follower.poll() == ([], False)


def test_follower_ignores_an_incomplete_line_that_a_resumed_run_cuts(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append(path, '{"step": 1}\n{"st')
    follower = JsonlFollower(path)
    follower.poll()
    os.truncate(path, len('{"step": 1}\n'))
    append(path, '{"step": 2}\n')
    assert follower.poll() == ([{"step": 2}], False)


def test_follower_starts_again_when_the_file_is_replaced_even_by_a_longer_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append(path, '{"step": 1}\n{"step": 2}\n')
    follower = JsonlFollower(path)
    follower.poll()
    new = tmp_path / "new"
    append(new, '{"step": 1}\n{"step": 2, "again": 1}\n')
    new.replace(path)
    assert follower.poll() == ([{"step": 1}, {"step": 2, "again": 1}], True)
    assert follower.poll() == ([], False)


def test_follower_starts_again_when_the_file_is_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append(path, '{"step": 1}\n{"step": 2}\n')
    follower = JsonlFollower(path)
    follower.poll()
    os.truncate(path, len('{"step": 1}\n'))
    assert follower.poll() == ([{"step": 1}], True)


def test_a_file_that_disappears_and_returns_is_read_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append(path, '{"step": 1}\n')
    follower = JsonlFollower(path)
    follower.poll()
    path.rename(tmp_path / "metrics.1.jsonl")
    assert follower.poll() == ([], False)
    append(path, '{"step": 1}\n')
    assert follower.poll() == ([{"step": 1}], True)


def test_read_records_skips_what_is_not_a_record(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_records(path) == []
    path.write_bytes(b'{"step": 1}\n\x00\x00\xff\n[1]\n{"step": 2}\n{"step": 3}')
    assert read_records(path) == [{"step": 1}, {"step": 2}]


def test_readers_of_metrics_get_steps_and_numbers_whatever_a_file_holds(tmp_path):
    path = tmp_path / "metrics.jsonl"
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
        with pytest.raises(DamagedFile, match="not a file"):
            read_metrics(tmp_path / name)
    assert last_lines(tmp_path / "pipe") == []
