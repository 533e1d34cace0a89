"""Real SGLang servers of a dense model in bf16: one is frozen in every phase of a publish, or keeps what it had."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dppo_megatron.engines.sglang.server import sglang_python
from tests.support.engines import Reference, engine_config, make_model, running_server
from tests.support.faults import Proxy
from tests.weight_sync.test_real_engines import FreezesAt, finished, listening, publish
from tests.weight_sync.test_stale_engines import EVERYTHING, NOTHING, check_named, publish_faults
from tests.weight_sync.trainer_process import PROBE, WAIT

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]
TOLERANCE = 0.1  # of bf16; the log-probs of the two policies differ by several nats


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    root = tmp_path_factory.mktemp("sglang") / "models"
    return make_model(root / "a", seed=1), make_model(root / "b", seed=2)


@pytest.fixture(scope="module")
def two_servers(policies, tmp_path_factory):
    config = engine_config(policies[0], kind="sglang", dtype="bf16")
    if not sglang_python(config).with_name("sglang").exists():
        pytest.skip("needs SGLang's environment (make sglang)")
    logs = tmp_path_factory.mktemp("logs")
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as threads:  # they take long to start
        started = [threads.submit(stack.enter_context, running_server(config, logs / n, version=0)) for n in "01"]
        yield [server.result() for server in started]


def test_what_a_model_without_experts_kept_is_named(two_servers, policies):
    faults = (NOTHING, EVERYTHING, "layer 0")
    directory = policies[0].parent.parent / "stale"
    check_named(*publish_faults("sglang", policies[0], two_servers[0], directory, faults, transport="shared_storage"))


@pytest.mark.parametrize(
    ("transport", "routes"),
    [
        ("shared_storage", ("/update_weights_from_disk", "/generate", "/weights_checker")),
        ("broadcast", ("/init_weights_update_group", "/update_weights_from_distributed")),
    ],
)
def test_an_engine_frozen_in_any_phase_is_left_out(two_servers, policies, transport, routes):
    """As vLLM in test_real_engines: the other one goes on with the new policy, and the next publish has both again."""
    directory = policies[0].parent.parent / f"frozen-{transport}"  # engines read where their models are alone
    server = listening(two_servers[1])
    phases = {2 * place + 1: route for place, route in enumerate(routes)}
    hook = FreezesAt([server, *server.children(recursive=True)], directory / "records.json", dict(phases))
    a, b = policies
    settings = {"shared_storage": {}, "broadcast": {"bucket_bytes": 20_000}}[transport]
    try:
        with Proxy(two_servers[1], hook) as proxy:
            processes, out = publish(
                directory,
                a,
                [two_servers[0], proxy.url],
                [b, WAIT, a, WAIT, b][: 2 * len(routes) - 1],
                engine={"kind": "sglang", "health_interval_s": 0.5, "health_timeout_s": 2, "health_failures": 3},
                dtype="bf16",
                transport=transport,
                timeout_s=6,
                **settings,
            )
            records = finished(processes, out, 300)
    finally:
        hook.thaw()
    assert hook.frozen == list(routes)
    for record, policy in zip(records, (b, a, b), strict=False):
        assert record["engines"] == 1
        assert np.abs(np.array(record["scores"][two_servers[0]]) - Reference(policy).score(PROBE)).max() < TOLERANCE
