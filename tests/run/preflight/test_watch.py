"""A preflight with real processes on this machine, and when one is given up."""

import json
import subprocess
import sys
import threading
import time

import pytest

from dppo_megatron.config import save_resolved
from dppo_megatron.run.preflight import watch
from dppo_megatron.run.preflight.task import DONE, IMPORTED, LOOKED, MARK, READY, STARTED
from dppo_megatron.run.preflight.watch import run_preflight
from dppo_megatron.run_dir import RunDir
from tests.support.configs import make_config


@pytest.fixture
def config(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "run").mkdir()
    return make_config(
        run={"dir": str(tmp_path / "run")},
        model={"path": str(tmp_path / "model")},
        data={"train": str(tmp_path / "rows.jsonl"), "eval": None},
        parallel={"world_size": 2, "tensor": 2},
        weight_sync={"transport": "broadcast"},
        slurm={"gpus_per_node": 0, "start_timeout_s": 30},
    )


@pytest.mark.slow
def test_two_ranks_and_a_place_that_gets_weights(config, tmp_path):
    """`--json`, as a user calls it."""
    save_resolved(config, tmp_path / "config.yaml")
    command = [sys.executable, "-m", "dppo_megatron", "preflight", str(tmp_path / "config.yaml"), "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900)
    report = json.loads(result.stdout)
    assert (result.returncode, report["ok"], report["bad_nodes"]) == (0, True, [])
    assert len(report["nodes"]) == 1
    assert json.loads((tmp_path / "run" / "preflight.json").read_text())["findings"] == report["findings"]
    log = (tmp_path / "run" / "logs" / "preflight.log").read_text()
    for group in ("tensor 0", "world 0", "weights"):
        assert log.count(f'"left": "{group}", "wrong": []') == 2


class Written:
    """A fake process that runs, or that ended with `code`."""

    def __init__(self, code):
        self.code = code

    def poll(self):
        return self.code


def write(config, lines):
    with RunDir(config.run.dir).log("preflight").open("a") as file:
        file.writelines(line if isinstance(line, str) else f"{MARK}{json.dumps(line)}\n" for line in lines)


class WritesLines:
    """A launcher with the lines of a process and its exit code as plans."""

    def __init__(self, config):
        self.config = config

    def start(self, plan):
        lines, code = plan
        write(self.config, lines)
        return Written(code)

    def end(self, processes, grace_s):
        assert processes


def conclude(config, places, lines, codes=(None,)):
    return run_preflight(config, places, WritesLines(config), [(lines, codes[0]), *(((), c) for c in codes[1:])], "7")


def line(rank, node, **facts):
    return {"task": f"rank-{rank}", "node": node, **facts}


PLACES = {"rank-0": "a", "rank-1": "b"}


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(watch, "silence_timeout_s", lambda size: 0.3)
    monkeypatch.setattr(watch, "AFTER_FAILURE_S", 0.2)


def test_silence_is_a_failure_of_those_behind(config, quick):
    lines = [line(0, "a", stage=READY), line(0, "a", joins="tensor 0"), line(1, "b", stage=IMPORTED)]
    found = conclude(config, PLACES, lines)
    assert found.bad_nodes == ("b",)
    assert found.text().splitlines()[-1].startswith("preflight: 2 nodes, 1 errors, ")
    assert "rank-1: no answer while looking at GPUs" in found.text()


def test_half_that_still_imports_gets_as_long_as_the_other_half_needed(config, quick):
    began = time.monotonic()
    found = conclude(config, PLACES, [line(0, "a", stage=READY), line(1, "b", stage=STARTED)])
    assert 0.4 < time.monotonic() - began < 5
    assert found.bad_nodes == ("b",)


def test_one_that_failed_at_once_does_not_hurry_those_that_import(config, quick):
    """rank-1 imports for ten times the silence that would end it, then is done."""
    late = threading.Timer(3.0, lambda: write(config, [line(1, "b", stage=DONE)]))
    late.start()
    found = conclude(config, PLACES, [line(0, "a", error="no such file"), line(1, "b", stage=STARTED)])
    late.join()
    assert found.bad_nodes == ("a",)
    assert found.seconds >= 3.0


def test_slurms_words_for_a_task_that_ended(config, quick):
    found = conclude(config, PLACES, [line(0, "a", stage=LOOKED), "srun: error: b: task 1: Killed\n"])
    assert [str(finding) for finding in found.errors] == ["error: b: a process there ended: Killed"]


def test_slurms_words_for_a_task_that_did_not_start(config, quick):
    text = "srun: error: Task launch for StepId=7.1 failed on node b: Communication connection failure\n"
    found = conclude(config, PLACES, [line(0, "a", stage=LOOKED), text])
    assert found.bad_nodes == ("b",)


def test_a_local_process_that_ended(config, quick):
    places = {"rank-0": "a", "rank-1": "a"}
    found = conclude(config, places, [line(0, "a", stage=LOOKED)], (None, -9))
    assert [str(finding) for finding in found.errors] == ["error: a: a process there ended: killed by SIGKILL"]


def test_lines_of_an_earlier_preflight_do_not_count(config, quick):
    conclude(config, PLACES, [line(rank, node, stage=DONE) for rank, node in enumerate("ab")])
    found = conclude(config, PLACES, [line(0, "a", stage=DONE)])
    assert found.bad_nodes == ("b",)


def test_lines_may_have_other_output_before_them_and_between(config, quick):
    """`srun --label`, a library's progress bar, and one that is not ours."""
    label = [f"{rank}: {MARK}{json.dumps(line(rank, node, stage=DONE))}\n" for rank, node in enumerate("ab")]
    assert not conclude(config, PLACES, [f"{MARK}{{broken\n", "\n", *label]).errors


def test_a_clock_is_compared_with_the_drivers(config, quick):
    lines = [line(rank, node, stage=DONE, clock=time.time() - 60 * rank) for rank, node in enumerate("ab")]
    (finding,) = conclude(config, PLACES, lines).findings
    assert (finding.level, finding.nodes) == ("warning", ("b",))
