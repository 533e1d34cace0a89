"""An engine on two nodes, which are two servers of this machine: it serves, takes new weights, dies and comes back.

One engine for all tests, started and restarted as a run does it. The tests depend on their order: the last one kills
the second node.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import psutil
import pytest

from dppo_megatron.config import Config, save_resolved
from dppo_megatron.rollout.engines.kinds import kind_of
from dppo_megatron.rollout.fleet.registry import engine_services
from dppo_megatron.run.launch.driver import RestartedServer
from dppo_megatron.run.launch.evaluate import with_settings
from dppo_megatron.run.launch.local_processes import LocalLauncher, engine_plans
from dppo_megatron.run_dir import RunDir
from dppo_megatron.weights.published import PublishedPolicy
from tests.support.engines import START_TIMEOUT_S, Reference, engine_config, group, make_model, with_engine
from tests.train.weight_sync.test_real_engines import publish
from tests.train.weight_sync.trainer_process import PROBE

pytestmark = pytest.mark.engines
TOLERANCE = 1e-4


@dataclass
class TwoNodes:
    config: Config
    server: RestartedServer
    models: dict

    @property
    def url(self) -> str:
        return engine_services(self.config, RunDir(self.config.run.dir))["engine-0"].url

    def use(self, function):
        return with_engine(self.config, self.url, function)

    def wait_until_registered(self) -> list[str]:
        """Wait, and return the launcher's reports until then."""
        reported, deadline = [], time.monotonic() + START_TIMEOUT_S
        while self.server.process.poll() is not None or not engine_services(self.config, RunDir(self.config.run.dir)):
            reported += [line for line in [self.server.check(time.monotonic())] if line]
            alive = not self.server.failed and time.monotonic() < deadline
            assert alive, self.server.process.log.read_text()[-3000:]
            time.sleep(0.1)
        return reported + [line for line in [self.server.check(time.monotonic())] if line]

    def node(self, rank: int) -> psutil.Process:
        """The server process of one node."""
        (process,) = (
            child
            for child in psutil.Process(self.server.process.pid).children()
            if ["--node-rank", str(rank)] == child.cmdline()[(at := child.cmdline().index("--node-rank")) : at + 2]
        )
        return process


@pytest.fixture(scope="module", params=["tensor_parallel", "pipeline_parallel", "sglang"])
def engine(request, tmp_path_factory) -> Iterator[TwoNodes]:
    root = tmp_path_factory.mktemp("two-nodes")
    models = {name: make_model(root / name, seed) for seed, name in enumerate("ab", 1)}
    layout = {"kind": "sglang", "tensor_parallel": 2} if request.param == "sglang" else {request.param: 2}
    config = engine_config(models["a"], nodes=2, **layout)
    if not kind_of(config).python(config).exists():
        pytest.fail(f"{kind_of(config).python(config)} is not there; `make sglang` builds it")
    config.engine.env["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"  # SGLang's own choice allows a worker on each NUMA node
    if request.param == "pipeline_parallel":
        # In eager mode vLLM 0.32 on CPUs makes no receive buffers for a stage: its first request would fail.
        engine = {"extra_args": ("--no-enforce-eager",), "env": {**config.engine.env, "VLLM_USE_AOT_COMPILE": "0"}}
        config = with_settings(config, engine=engine)
    run = RunDir(config.run.dir)
    run.make()
    save_resolved(config, run.config)
    (plan,) = engine_plans(config, trains=False)
    launcher = LocalLauncher(run)
    server = RestartedServer(launcher, plan, run, limit=1)
    started = TwoNodes(config, server, models)
    try:
        started.wait_until_registered()
        yield started
    finally:
        launcher.end([server.process], 5.0)


def test_it_samples_and_scores_as_one_engine(engine):
    reference = Reference(engine.models["a"])

    async def ask(client):
        return await client.info(), await client.score(PROBE), await client.generate(group("g"))

    info, scores, rollouts = engine.use(ask)
    assert (info.workers, info.version) == (2, 0)
    assert np.abs(scores - reference.score(PROBE)).max() < TOLERANCE
    for rollout in rollouts:
        assert np.abs(rollout.rollout_logprob - reference.sampled(rollout.token_ids)).max() < TOLERANCE


@pytest.mark.parametrize("transport", ["shared_storage", "broadcast"])
def test_a_trainer_publishes_to_workers_of_both_nodes(engine, tmp_path, transport):
    """Confirmed by fingerprints of all workers and by log-probs."""
    policies = [engine.models[name] for name in "bab"]
    settings = {"transport": transport, "bucket_bytes": 50_000, "timeout_s": 60}
    kind = {"kind": engine.config.engine.kind}
    records = publish(tmp_path, engine.models["a"], [engine.url], policies, engine=kind, **settings)
    for record, policy in zip(records, policies, strict=True):
        assert record["engines"] == 1, record
        (scores,) = record["scores"].values()
        assert np.abs(np.array(scores) - Reference(policy).score(PROBE)).max() < TOLERANCE


@pytest.mark.parametrize("engine", ["tensor_parallel"], indirect=True)
def test_it_restarts_as_one_when_its_second_node_is_killed(engine):
    before = engine.node(0), engine.node(1)
    PublishedPolicy(7, str(engine.models["b"]), 0.0).write(RunDir(engine.config.run.dir).published)
    before[1].kill()
    while engine.server.process.poll() is None:
        time.sleep(0.05)
    reported = engine.wait_until_registered()
    assert not any(process.is_running() for process in before)
    assert "Restart 1 of 1" in reported[0]
    assert reported[-1] == "engine-0 serves again"

    async def ask(client):
        return (await client.info()).version, await client.score(PROBE)

    version, scores = engine.use(ask)
    assert version == 7
    assert np.abs(scores - Reference(engine.models["b"]).score(PROBE)).max() < TOLERANCE
