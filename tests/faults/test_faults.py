"""Engines under a real run are killed, frozen, garbled and brought back wrong; the run must not notice in its result.

At staleness 0 a request that is sent again samples the same tokens, so every disturbed run ends with exactly the
weights of the undisturbed one.
"""

import json
import time

import numpy as np
import pytest

from dppo_megatron.rollout.engines.vllm.extension.wire import decode_reply, encode_reply
from dppo_megatron.rollout.fleet.registry import free_port
from dppo_megatron.run_dir import RunDir
from dppo_megatron.weights.delta import is_delta
from dppo_megatron.weights.published import PublishedPolicy
from tests.support import faults
from tests.support.runs import end_session, engine_tree, records, start, steps_done, wait_until, write_config

pytestmark = pytest.mark.faults

RESTART_S = 90.0  # back-off, start of a server, load and weight check, on two busy cores
REST_S = 90.0  # the rest of a run


def test_killed_while_it_generates(start_run, undisturbed):
    """Its requests go to the other engine; the launcher restarts it, and it is verified before it serves again."""
    run = start_run(count=2)
    run.wait_for_step(1)
    last = 0

    def kill_it(times: int) -> None:
        nonlocal last
        pid = run.engine_pid("engine-1")
        faults.wait_while_generating(run, run.engine_url("engine-1"))
        faults.kill(pid)
        last = max(steps_done(run.dir)) + 1
        with run.held():
            run.wait_for_log("orchestrator", "engine-1 loaded policy", RESTART_S, times)
            run.wait_for_log("train", "engine-1 serves again", 5, times)

    kills = faults.lose_a_request(run, kill_it)
    run.wait_to_end(REST_S)
    assert run.total("engine/retried_requests") >= 1
    if last < faults.STEPS:  # no step records what happens in the last one
        assert run.total("engine/restarts") == kills
    assert "engine-1 ended: " in run.output.read_text()
    run.check_equals(undisturbed)


def test_a_run_that_publishes_deltas_survives_kills_of_its_only_engine(start_run, undisturbed_slowly, tmp_path):
    """It is killed before the trainer publishes a delta, and again while the trainer does. The publisher and the
    orchestrator wait for the launcher to bring it back. It starts with the last whole model and loads the changes
    since. The run that nothing disturbs publishes all of the weights."""
    memory = tmp_path / "memory"
    run = start_run(optimizer=faults.SLOWLY, weight_sync={"full_every": 4, "directory": str(memory)})
    weights = RunDir(run.dir).weights_of
    run.wait_for_step(2)
    with run.held():
        assert is_delta(weights(1))
        assert weights(1).resolve().parent == memory.resolve()
        faults.kill(run.engine_pid("engine-0"))
    run.wait_until(lambda: 4 in steps_done(run.dir), "step 4", RESTART_S + REST_S)
    run.wait_until(weights(5).exists, "the next delta", REST_S)
    faults.kill(run.engine_pid("engine-0"))
    run.wait_to_end(RESTART_S + REST_S)
    assert run.total("engine/restarts") == 2
    assert sum(0 < record.get("publish/changed_share", 0) < 0.5 for record in records(run.dir)) >= 3
    run.check_equals(undisturbed_slowly)
    assert not memory.exists(), "the run gives back what it took"


@pytest.mark.smoke
def test_frozen_while_it_generates(start_run, engines, undisturbed):
    run = start_run(urls=[engine.url for engine in engines])
    run.wait_for_step(1)
    pid = json.loads((engines[1].directory / "services" / "engine-0.json").read_text())["pid"]

    def freeze(times: int) -> None:
        with faults.frozen(pid, lambda: faults.wait_while_generating(run, engines[1].url)):
            with run.held():  # if the engine had answered, the run could end before the engine is noticed
                run.wait_for_log("orchestrator", "-> dead", faults.NOTICED_S + 10, times)
            # Publishing waits for it once for health_timeout_s and then for a second each time.
            run.wait_for_log("trainer-0", "without engine-1", 30, times)
            holding = run.held()
            holding.__enter__()
        run.wait_for_log("orchestrator", "engine-1 loaded policy", 30, times)
        holding.__exit__(None, None, None)

    faults.lose_a_request(run, freeze)
    run.wait_to_end(REST_S)
    assert run.total("engine/retried_requests") >= 1
    assert run.total("engine/unconfirmed") >= 1
    run.check_equals(undisturbed)


class Garbler:
    """Corrupts the first replies with samples, each in another way and every third not at all."""

    def __init__(self):
        self.left = ["truncated", "lengths", None, "nan", "ids", None, "reset", "text"]
        self.done: list[str] = []

    async def __call__(self, path, body, forward):
        if path != "/dppo/generate" or not self.left:
            return await forward()
        kind = self.left.pop(0)
        if kind is not None:
            self.done.append(kind)
        return self._corrupt(kind, await forward())

    def _corrupt(self, kind, reply):
        if kind in (None, "reset", "truncated", "text"):
            return {None: reply, "reset": None, "truncated": reply[:-7], "text": b"<html>502</html>"}[kind]
        header, arrays = decode_reply(reply)
        arrays = {name: array.copy() for name, array in arrays.items()}
        if kind == "lengths":
            arrays["lengths"][0] += 1
        if kind == "nan":
            arrays["rollout_logprob"][-1] = np.nan
        if kind == "ids":
            arrays["token_ids"][0] = 100_000
        return encode_reply(header, arrays)


def test_garbage(start_run, engines, undisturbed):
    """Invalid samples are refused, counted, and sampled by the other engine with the same seeds."""
    garbler = Garbler()
    with faults.Proxy(engines[1].url, garbler) as proxy:
        # So many failures allowed that it gets requests again and again.
        run = start_run(urls=[engines[0].url, proxy.url], health_failures=10)
        run.wait_to_end(REST_S + 30)
    assert garbler.done == ["truncated", "lengths", "nan", "ids", "reset", "text"]
    assert run.total("rollout/invalid_samples") == 5  # a lost connection makes no sample invalid
    assert run.total("engine/retried_requests") == 6
    run.check_equals(undisturbed)


class KillsAtUpdate:
    """Kills the server when it is half-way through loading policy `version`."""

    def __init__(self, version: int):
        self.version = version
        self.victim = 0
        self.killed = False

    async def __call__(self, path, body, forward):
        if path == "/dppo/load_weights" and json.loads(body)["version"] == self.version and not self.killed:
            self.killed = True
            faults.kill(self.victim)
        return await forward()


def test_killed_during_an_update_and_restarted_with_old_weights(task, start_run, engines, undisturbed, tmp_path):
    """It comes back at the same address with the start weights and claims to serve the current policy."""
    home = tmp_path / "own-engine"
    home.mkdir()
    tree = engine_tree(task, home)
    tree["engine"]["port"] = free_port()
    config = write_config(tree, home / "config.yaml")
    service = home / "services" / "engine-0.json"

    def serve():
        process = start("engine", config, output=home / "engine.out")
        wait_until(service.exists, "the engine", process, home / "engine.out")
        return process, json.loads(service.read_text())

    process, registered = serve()
    killer = KillsAtUpdate(version=2)
    try:
        killer.victim = registered["pid"]
        with faults.Proxy(registered["url"], killer) as proxy:
            run = start_run(urls=[engines[0].url, proxy.url])
            run.wait_for_step(2)
            with run.held():
                assert killer.killed
                run.wait_until(lambda: process.poll() is not None, "the end of the killed engine", 30)
                current = PublishedPolicy.read(RunDir(run.dir).published).version
                old = PublishedPolicy(current, str(task / "random_model"), time.time())
                old.write(RunDir(home).published)  # the engine's start weights
                process, registered = serve()
                assert faults.info(run, registered["url"])["version"] == current
                back = len(proxy.seen)
                run.wait_for_log("orchestrator", f"engine-1 loaded policy {current}", 30)
            run.wait_to_end(REST_S)
            served = [path for path in proxy.seen[back:] if path in ("/dppo/load_weights", "/dppo/generate")]
            assert served[0] == "/dppo/load_weights", "it sampled before its weights were replaced"
            assert "/dppo/generate" in served
    finally:
        end_session(process)
    assert run.total("engine/unconfirmed") >= 1
    run.check_equals(undisturbed)
