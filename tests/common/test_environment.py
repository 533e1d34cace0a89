"""The environment that child processes get, and hosts in URLs."""

from __future__ import annotations

import ast
import asyncio
import os
import sys
from pathlib import Path

import aiohttp
import pytest
from pydantic import ValidationError

import dppo_megatron
from dppo_megatron.common.environment import SPINS, child_environment, cpu_threads
from dppo_megatron.common.process import Child
from dppo_megatron.config.engine import EngineConfig
from dppo_megatron.config.task import EnvironmentConfig
from dppo_megatron.rollout.engines.kinds import KINDS
from dppo_megatron.rollout.fleet.registry import free_port, port_in_use
from dppo_megatron.rollout.gateway.server import Gateway
from dppo_megatron.weights.process_group import WeightRendezvous, local_address
from tests.support.configs import make_config

NO_CHILD = (
    "RANK WORLD_SIZE LOCAL_RANK GROUP_RANK ROLE_RANK OMPI_COMM_WORLD_RANK MASTER_ADDR MASTER_PORT ROLE_NAME "
    "TORCHELASTIC_USE_AGENT_STORE TORCHELASTIC_RUN_ID PYTHONSAFEPATH PYTHONWARNINGS PYTHONOPTIMIZE PYTHONINSPECT "
    "PYTHONSTARTUP PYTHONIOENCODING "
)
NO_SERVER = (
    "VLLM_PORT VLLM_HOST_IP VLLM_SERVICE_HOST VLLM_DP_RANK_LOCAL VLLM_RPC_BASE_PATH VLLM_USE_FLASHINFER_SAMPLER "
    "SGLANG_PORT SGLANG_RETURN_ORIGINAL_LOGPROB SGL_ANYTHING DPPO_EXACT DPPO_SECRET PYTORCH_CUDA_ALLOC_CONF "
    "PYTORCH_ALLOC_CONF VLLM_CPU_KVCACHE_SPACE VLLM_KV_CACHE_LAYOUT VLLM_DISABLE_PYNCCL "
)
ALL = (
    "NCCL_SOCKET_IFNAME UCX_TLS LD_LIBRARY_PATH LD_PRELOAD CUDA_VISIBLE_DEVICES OMP_NUM_THREADS MKL_NUM_THREADS "
    "HF_HOME TOKENIZERS_PARALLELISM SSL_CERT_FILE PYTHONPATH PYTHONHASHSEED PYTHONDONTWRITEBYTECODE SLURM_JOB_ID "
    "TORCH_LOGS VLLM_CACHE_ROOT VLLM_LOGGING_LEVEL VLLM_NCCL_SO_PATH SGLANG_CACHE_DIR HTTPS_PROXY HTTP_PROXY "
)


def test_a_child_gets_all_variables_but_those_of_other_programs(monkeypatch):
    no_child, no_server = set(NO_CHILD.split()), set(NO_SERVER.split())
    names = {*no_child, *no_server, *ALL.split()}
    for name in names:
        monkeypatch.setenv(name, "tcp://10.0.0.1:8000")  # as Kubernetes sets variables of a service
    child, server = child_environment({"RANK": "3"}), child_environment({"VLLM_PORT": "1"}, server=True, peer="node1")
    assert names - child.keys() == no_child - {"RANK"}
    assert names - server.keys() == (no_child | no_server) - {"VLLM_PORT"}
    assert (child["RANK"], server["VLLM_PORT"]) == ("3", "1")


@pytest.mark.parametrize(
    ("sharing", "threads"),
    [(0, {}), (1, {"OMP_NUM_THREADS": "6", "GOMP_SPINCOUNT": str(SPINS)}), (4, {"OMP_NUM_THREADS": "1"})],
)
def test_the_threads_of_all_children_sleep_without_work_and_fit_the_affinity(monkeypatch, sharing, threads):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    assert cpu_threads(sharing) == threads | {"OMP_WAIT_POLICY": "PASSIVE"}
    given = {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "ACTIVE"}
    assert cpu_threads(sharing, given) == {}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    child = child_environment(sharing=sharing)
    assert {name: child.get(name) for name in (*given, "GOMP_SPINCOUNT")} == given | {"GOMP_SPINCOUNT": None}


@pytest.mark.parametrize(("count", "nodes", "threads"), [(1, 0, "6"), (2, 0, "3"), (2, 2, "6")])
@pytest.mark.parametrize("kind", KINDS)
def test_engines_of_a_machine_share_its_cpus(monkeypatch, kind, count, nodes, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of the ranks
    config = make_config(engine={"kind": kind, "count": count}, slurm={"engine_nodes": nodes})
    found = KINDS[kind].environment(config, 0, device="cpu")
    assert (found["OMP_NUM_THREADS"], found["OMP_WAIT_POLICY"]) == (threads, "PASSIVE")


@pytest.mark.parametrize(
    ("before", "peer", "after"),
    [
        ({}, "node1", {"no_proxy": "127.0.0.1,localhost,::1,node1"}),
        ({"NO_PROXY": "a.b"}, "", {"no_proxy": "a.b,127.0.0.1,localhost,::1"}),
        ({"no_proxy": "*"}, "node1", {"no_proxy": "*"}),
        ({"NO_PROXY": "judge", "no_proxy": "a.b"}, "::1", {"no_proxy": "judge,a.b,127.0.0.1,localhost,::1"}),
        ({"HTTP_PROXY": "SOCKS5://p"}, "node1", {"HTTP_PROXY": None}),
        (
            {"ALL_PROXY": "socks5://p", "HTTPS_PROXY": "http://p"},
            "node1",
            {"ALL_PROXY": None, "HTTPS_PROXY": "http://p"},
        ),
        ({"ALL_PROXY": "socks5://p"}, "", {"ALL_PROXY": "socks5://p"}),
        (
            {"http_proxy": "http://p", "https_proxy": "http://p"},
            "fd00::1",
            {"http_proxy": None, "https_proxy": "http://p"},
        ),
        ({"https_proxy": "socks5://p"}, "fd00::1", {"https_proxy": None}),
    ],
)
def test_requests_to_a_peer_and_to_loopback_pass_no_proxy(monkeypatch, before, peer, after):
    monkeypatch.setattr("dppo_megatron.common.environment.find_spec", lambda name: None)
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    child = child_environment(peer=peer)
    assert {name: child.get(name) for name in after} == after
    assert child["NO_PROXY"] == child["no_proxy"]


def test_sockets_of_a_child_fit_below_its_directory_of_temporary_files(tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    child = Child("x", [sys.executable, "-c", "import tempfile; print(tempfile.gettempdir())"], tmp_path / "out")
    while child.poll() is None:
        pass
    assert len(child.log.read_text().strip()) + len("/" + 36 * "u") <= 107
    monkeypatch.setenv("TMPDIR", str(deep.parent))
    monkeypatch.setattr("tempfile.tempdir", "/short")
    assert child_environment()["TMPDIR"] == str(deep.parent)  # as the user chose it


def test_every_process_of_the_package_gets_its_environment_from_one_function():
    others = {"rollout/environments/python_tool.py", "run/slurm/step.py"}  # a sandbox, and srun
    root = Path(dppo_megatron.__file__).parent
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())) if "subprocess.Popen" in file.read_text() else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "subprocess.Popen":
                given = {word.arg: ast.unparse(word.value) for word in node.keywords}
                used = "child_environment" in given.get("env", "") or given.get("env") == "environment"
                assert used or str(file.relative_to(root)) in others, file


@pytest.mark.parametrize("section", [EngineConfig, EnvironmentConfig])
def test_a_host_is_a_name_or_an_address(section):
    for host in ("127.0.0.1", "localhost", "node-1.cluster", "::1", "::", "fd00::2", "FD00::2"):
        assert section(host=host).host == host
    for host in (
        "",
        "[::1]",
        "::1:8000:x",
        "node:1",
        "127.0.0.1:80",
        "http://node",
        "a,b",
        "fe80::1%eth0",
        "a/b",
        ".",
        "a..b",
        "-a",
    ):
        with pytest.raises(ValidationError, match="must be a host name or an IP address"):
            section(host=host)


@pytest.mark.parametrize(
    "rest", ["u:p@a:1", "[fe80::1%25eth0]:1", "a b:1", "*:1", "a..b:1", "a:1#", "a:1/?", "a:1\n", "a:"]
)
def test_a_url_has_only_a_host_and_a_port(rest):
    for url in ("http://a:1", "https://a", "http://[::1]:80", "HTTP://A:1"):
        assert EngineConfig(urls=[f"{url}/"]).urls == (url,)
    for url in (f"http://{rest}", " http://a:1"):
        with pytest.raises(ValidationError, match="must be http://HOST:PORT"):
            EngineConfig(urls=[url])


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::"])
def test_a_gateway_is_reached_by_its_url(host):
    async def status() -> int:
        async with Gateway(host) as gateway, aiohttp.ClientSession() as client:
            port = int(gateway.url.rpartition(":")[2])
            assert port_in_use(host, port)
            async with client.get(f"{gateway.url}/v1/models") as reply:
                return reply.status

    assert asyncio.run(status()) == 401
    assert not port_in_use(host, free_port(host))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("loopback", [True, False])
def test_the_weight_group_meets_at_addresses_of_both_versions(host, loopback):
    rendezvous = WeightRendezvous.host("group", 1, 5.0, loopback=loopback)
    address = local_address(host)
    assert address == "127.0.0.1"  # one address for this machine
    WeightRendezvous.connect(address, rendezvous.port, "group", 1, 5.0)
    if not loopback:
        WeightRendezvous.connect(host, rendezvous.port, "group", 1, 5.0)


def test_a_host_that_is_not_of_this_machine_has_no_free_port():
    with pytest.raises(
        Exception, match=r"no port of 192.0.2.1 is free; give an address of this machine \(engine.host\)"
    ):
        free_port("192.0.2.1")


@pytest.mark.parametrize(
    ("host", "expected"),
    [("::1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("fd00::2", "fd00::2"), ("10.0.0.1", "10.0.0.1"), ("::", None)],
)
def test_vllm_listens_at_the_host_of_the_config(host, expected):
    config = make_config(engine={"host": host})
    assert KINDS["vllm"].environment(config, 0, device="cuda").get("VLLM_HOST_IP") == expected
