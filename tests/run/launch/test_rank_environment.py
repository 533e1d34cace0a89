"""A rank's environment variables for CUDA's queues and NCCL's buffers, by layout, GPUs and engines."""

import os

import pytest

from dppo_megatron.run.launch.local_processes import local_plan, rank_plans
from dppo_megatron.run.launch.rank_environment import connection_environment
from tests.support.configs import make_config

ONE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
LAYOUTS = {"tensor": {"world_size": 2, "tensor": 2}, "context": {"world_size": 2, "context": 2}}


@pytest.fixture(autouse=True)
def gpus(tmp_path, monkeypatch):
    """f(text) -> nvidia-smi prints it; without a call there is none."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def write(text: str) -> None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{text}'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)

    return write


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [("9.0\\n9.0\\n", ONE), ("8.0\\n", ONE), ("10.0\\n10.0\\n", {}), ("12.0\\n9.0\\n", ONE), ("no devices\\n", ONE)],
)
def test_megatrons_demand_up_to_hopper(gpus, layout, capabilities, expected):
    gpus(capabilities)
    assert connection_environment(make_config(parallel=layout)) == expected


def test_without_tensor_and_context_parallelism_nothing_is_demanded(gpus):
    gpus("9.0\\n")
    assert connection_environment(make_config(parallel={"world_size": 4, "pipeline": 2})) == {}


def test_a_variable_that_the_user_set_is_kept(gpus, monkeypatch):
    gpus("9.0\\n")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    assert connection_environment(make_config(parallel=LAYOUTS["tensor"])) == {}


def test_every_rank_of_a_local_run_has_it(gpus):
    gpus("9.0\\n")
    plan = local_plan(make_config(parallel=LAYOUTS["tensor"]), resume=False)
    assert [rank.environment["CUDA_DEVICE_MAX_CONNECTIONS"] for rank in plan.trainers] == ["1", "1"]
    assert all(rank.environment["TORCH_FR_DUMP_TEMP_FILE"].endswith("logs/nccl_trace_rank_") for rank in plan.trainers)


@pytest.mark.parametrize(
    ("transport", "engine", "expected"),
    [
        ("broadcast", {"kind": "sglang"}, {"NCCL_CUMEM_ENABLE": "0"}),
        ("broadcast", {"kind": "sglang", "env": {"NCCL_CUMEM_ENABLE": "1"}}, {"NCCL_CUMEM_ENABLE": "1"}),
        ("broadcast", {"kind": "vllm"}, {}),
        ("shared_storage", {"kind": "sglang"}, {}),
    ],
)
def test_ranks_have_the_nccl_buffers_of_sglang(monkeypatch, transport, engine, expected):
    config = make_config(engine=engine, weight_sync={"transport": transport})
    assert connection_environment(config) == expected
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")  # engines inherit it
    assert connection_environment(config) == {}


def test_ranks_share_the_cpus_of_this_process_and_sleep_without_work(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for plan in rank_plans(make_config(parallel={"world_size": 2}), "trainer", ()):
        assert (plan.environment["OMP_NUM_THREADS"], plan.environment["OMP_WAIT_POLICY"]) == ("2", "PASSIVE")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    (plan,) = rank_plans(make_config(), "trainer", ())
    assert "OMP_NUM_THREADS" not in plan.environment  # a child inherits the user's
