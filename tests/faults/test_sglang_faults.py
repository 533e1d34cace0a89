"""The SGLang engine of a run is killed while it samples and as it gets new weights, and frozen while it samples; the
run trains every step on samples of its policy.

One engine and no undisturbed run: a server takes half a minute to start.
"""

import json
import urllib.request

import pytest

from dppo_megatron.run_dir import RunDir
from tests.support.faults import Run, frozen, kill
from tests.support.runs import steps_done

pytestmark = pytest.mark.faults

START_S = 300.0  # of a server, and with it of a run, on two busy cores
NOTICED_S = 60.0
REST_S = 120.0


def samples(run: Run) -> bool:
    """Whether the engine has a running request, by its own route."""
    secret = {"Authorization": f"Bearer {run.secret.read_text()}"}
    request = urllib.request.Request(f"{run.engine_url('engine-0')}/v1/loads", headers=secret)
    with urllib.request.urlopen(request, timeout=30) as reply:
        return sum(load["num_running_reqs"] for load in json.load(reply)["loads"]) > 0


def test_killed_in_each_phase_then_frozen_while_it_samples(start_run):
    run = start_run(
        kind="sglang",
        health_timeout_s=4.0,
        unavailable_timeout_s=START_S,
        start_timeout_s=START_S,
        request_timeout_s=60.0,
    )

    def deaths() -> int:
        return (run.dir / "logs" / "orchestrator.log").read_text().count("-> dead")

    run.wait_until(lambda: 1 in steps_done(run.dir), "step 1", START_S)
    run.wait_until(lambda: samples(run), "a running request", REST_S)
    kill(run.engine_pid("engine-0"))
    run.wait_for_log("train", "engine-0 serves again", START_S)
    run.wait_until(RunDir(run.dir).weights_of(max(steps_done(run.dir)) + 1).exists, "the next version", REST_S)
    kill(run.engine_pid("engine-0"))
    log = run.dir / "logs" / "train.log"
    run.wait_until(lambda: log.read_text().count("engine-0 serves again") > 1, "the engine again", START_S)
    run.wait_until(lambda: 4 in steps_done(run.dir), "step 4", REST_S)
    run.wait_until(lambda: samples(run), "a running request", REST_S)
    known = deaths()
    with frozen(run.engine_pid("engine-0")):
        run.wait_until(lambda: deaths() > known, "a dead engine", NOTICED_S)
    run.wait_to_end(REST_S + START_S)
    assert run.total("engine/restarts") >= 2
    assert run.total("engine/retried_requests") >= 1
    run.check_whole()
