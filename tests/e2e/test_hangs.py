"""A trainer rank hangs in a phase of a run: the run ends, and names rank, process, host, phase and awaited call."""

import re
import socket

import psutil
import pytest

from tests.support import runs

pytestmark = pytest.mark.slow
STALL_S = 20.0
# Where the other rank then waits; its phase is the same unless the hanging rank is late for it.
WAITS = {
    "load stopped 1": "",
    "publish stopped 1": "",
    "forward_backward busy 1": "forward_backward",
    "export busy 0": "",
}


@pytest.mark.parametrize("hang", WAITS)
def test_a_hanging_rank_is_named_and_ends_the_run(task, engine, tmp_path, hang):
    phase, how, rank = hang.split()
    tree = runs.config_tree(task, tmp_path / "run", urls=(engine.url,))
    tree["run"]["stall_timeout_s"] = STALL_S
    settings = {"phase": phase, "how": how, "rank": int(rank)}
    tree["objective"] = {"name": "tests.support.objectives:hanging", "settings": settings}
    tree["train"]["steps"] = 2
    done = runs.run("train", runs.write_config(tree, tmp_path / "config.yaml"), check=False)
    assert done.returncode == 1
    sign = "shows no sign of life" if how == "stopped" else "does not advance"
    named = (
        rf"rank {rank} \(process \d+ on {re.escape(socket.gethostname())}\) {sign} for [\d:]+, in {phase} of step \d"
    )
    said = done.stdout + done.stderr
    cause = re.search(named + r".*", said)
    assert cause, said
    assert re.search(r"rank \d waits in " + WAITS[hang], cause[0]), cause[0]
    for command in ("status", "doctor"):
        shown = runs.run(command, tmp_path / "run", "--json", check=False).stdout
        assert re.search(named, shown), shown
    assert not psutil.pid_exists(int(re.search(r"process (\d+)", cause[0])[1]))
