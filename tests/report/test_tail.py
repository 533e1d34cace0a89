import contextlib
import json
import math
import os
import random
import tracemalloc

import pytest

from dppo_megatron.common.files import DamagedFile
from dppo_megatron.report.logs import last_lines
from dppo_megatron.report.names import is_step_record
from dppo_megatron.report.tail import (
    BEGINNING,
    NEWEST,
    JsonlFile,
    JsonlFollower,
    evaluated,
    read_metrics,
    read_records,
    sparse,
)


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


def test_read_records_skips_lines_that_are_no_record(path):
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


def test_a_special_file_is_neither_waited_for_nor_read_for_ever(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "device", "."):
        with pytest.raises(DamagedFile, match="not a regular file"):
            read_metrics(tmp_path / name)
    assert last_lines(tmp_path / "pipe") == []


def write_long_run(path, steps, seed=0):
    """Sampling and step records, evaluations that end late, steps without some metrics, and what a crash left."""
    rng, late = random.Random(seed), []
    with path.open("w") as file:
        for step in range(1, steps + 1):
            record = {"step": step, "time": 1000.0 + step}
            row = {
                "train/loss": rng.random(),
                "rollout/reward_mean": rng.gauss(0.5, 0.1),
                "train/entropy": rng.random(),
            }
            if step > 7:
                row |= {"mismatch/kl": rng.random(), "rollout/response_tokens_mean": rng.random()}
            lines = [record | {"time/generate_s": 1.0, "engine/deaths": 0.0}, record | row]
            if step % 40 == 1:
                late.append({"step": step - 1, "time": 1001.0 + step, "eval/accuracy": rng.random()})
            if late and rng.random() < 0.3:
                lines.append(late.pop())
            file.writelines(json.dumps(line) + "\n" for line in lines)
            if rng.random() < 0.02:
                file.write('{"step": 3, "train/lo\n')


@pytest.mark.parametrize("seed", range(4))
def test_sparse_lines_have_the_records_that_readers_of_a_long_run_need(path, seed):
    write_long_run(path, 3000, seed)
    everything, few = read_metrics(path), read_metrics(path, sparse)
    steps = [record for record in everything if is_step_record(record)]
    later = iter(everything)
    assert all(record in later for record in few)  # in the same order
    assert few[-300:] == everything[-300:]
    whole = NEWEST - 20  # lines that a crash left count as steps
    assert [r for r in few if is_step_record(r)][-whole:] == steps[-whole:]
    assert few[: BEGINNING - 5] == everything[: BEGINNING - 5]
    assert [r for r in few if "eval/accuracy" in r] == [r for r in everything if "eval/accuracy" in r]
    for extreme in (min, max):
        assert extreme(r.get("rollout/reward_mean", 0.5) for r in few) == extreme(
            r["rollout/reward_mean"] for r in steps
        )
    assert len(few) < 0.2 * len(everything)
    write_long_run(path, NEWEST, seed)
    assert read_metrics(path, sparse) == read_metrics(path)
    assert evaluated(path) == {(r["step"], "heldout") for r in read_metrics(path) if "eval/accuracy" in r}


def test_a_first_poll_takes_no_more_memory_for_a_longer_file(path):
    most = {}
    for steps in (1000, 8000):
        write_long_run(path, steps)
        tracemalloc.start()
        JsonlFollower(path, sparse).poll()
        most[steps] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most[8000] < 1.5 * most[1000]


def test_only_the_first_poll_is_sparse(path):
    write_long_run(path, 1000)
    follower = JsonlFollower(path, sparse)
    assert len(follower.poll()[0]) < 1000
    more = "".join(json.dumps({"step": 1000 + s, "train/loss": 0.5}) + "\n" for s in range(1, 2 * NEWEST))
    with path.open("a") as file:
        file.write(more)
    assert len(follower.poll()[0]) == more.count("\n")
    path.unlink()
    write_long_run(path, 1000)
    records, restarted = follower.poll()
    assert restarted
    assert records == read_metrics(path, sparse)


@pytest.mark.parametrize("resume_step", [0, 1, 500, 998, 1000])
def test_a_resume_removes_the_records_of_later_steps(path, resume_step):
    write_long_run(path, 1000)
    with path.open("a") as file:
        file.write('{"step": "4"}\n[5]\n{"train/loss": 1}\n {"step": 2}\n{"step": 1e2}\n{"step": 7, "tr')

    def step(line):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return float(json.loads(line)["step"])
        return math.inf

    lines = path.read_text().splitlines(keepends=True)[:-1]
    JsonlFile(path, resume_step).close()
    assert path.read_text() == "".join(line for line in lines if step(line) <= resume_step)
