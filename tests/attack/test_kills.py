"""Ten seconds after kill -9 of the launcher at a random moment, no process of the run is left."""

import time
from pathlib import Path

import psutil
import pytest

from tests.attack import cases, generator
from tests.support.runs import TIMEOUT_S, config_tree, descendants, run, start, steps_done, write_config, write_task

GONE_S = 10.0
# Events, and the most seconds from each to the kill of the launcher. Most of a run's processes start then.
MOMENTS = {"command": 0.5, "processes": 6.0, "imports": 25.0, "step": 2.0}


def of_the_run(directory: Path) -> list[psutil.Process]:
    """Processes that work in `directory`, which their children inherit: names and environments may change."""
    found = []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()) == directory and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def reached(moment: str, process, run_dir: Path) -> bool:
    match moment:
        case "step":
            return bool(steps_done(run_dir))
        case "processes" | "imports":
            return len(descendants(process)) > 2
    return True


@pytest.mark.slow
def test_nothing_outlives_a_killed_launcher(tmp_path, monkeypatch):
    """The run has an engine, an orchestrator and two trainer ranks."""
    (tmp_path / "task").mkdir()
    task = write_task(tmp_path / "task", heldout=4)
    run("--help")  # the process that commands are forks of starts elsewhere
    for case in range(cases(4)):
        draw = generator("killed launcher", case)
        moment = list(MOMENTS)[case % len(MOMENTS)]
        directory = tmp_path / f"life-{case}"
        directory.mkdir()
        config = write_config(config_tree(task, directory / "run"), directory / "c.yaml")
        with monkeypatch.context() as inside:
            inside.chdir(directory)
            launcher = start("train", config, output=directory / "out", real=True)
        deadline = time.monotonic() + TIMEOUT_S
        while not reached(moment, launcher, directory / "run"):
            assert launcher.poll() is None, (directory / "out").read_text()
            assert time.monotonic() < deadline, f"case {case}: no {moment} within {TIMEOUT_S:g} s"
            time.sleep(0.01)
        after = 0.1 + draw.uniform(0.0, MOMENTS[moment])
        time.sleep(after)
        seen = len(of_the_run(directory))
        launcher.kill()
        began = time.monotonic()
        while (alive := of_the_run(directory)) and time.monotonic() - began < GONE_S:
            time.sleep(0.05)
        print(f"case {case}: {after:.2f} s after {moment}: {seen} processes, gone in {time.monotonic() - began:.2f} s")
        names = [(process.pid, process.cmdline()[:6]) for process in alive]
        for process in alive:
            process.kill()
        assert not names, f"case {case}: {after:.3f} s after {moment}"
