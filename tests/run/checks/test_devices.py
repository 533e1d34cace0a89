"""The list of visible GPUs decides which of them serve and which train."""

import socket

import pytest
import torch

from dppo_megatron.config.schema import Config
from dppo_megatron.errors import ExpectedError
from dppo_megatron.run.checks import devices
from dppo_megatron.run.checks.devices import engine_devices, fit_engines, gpu_problems, require_gpu
from tests.run.checks.conftest import errors
from tests.support.actor_cases import QWEN3_5, write_config
from tests.support.configs import make_config

EIGHT = [str(n) for n in range(8)]


def config(world_size=4, **engine) -> Config:
    return make_config(parallel={"world_size": world_size}, engine=engine)


def test_engines_take_the_gpus_after_the_trainer_ranks():
    two = config(world_size=4, count=2, tensor_parallel=2)
    assert engine_devices(two, 0, EIGHT) == ["4", "5"]
    assert engine_devices(two, 1, EIGHT) == ["6", "7"]
    assert gpu_problems(two, EIGHT) == []
    assert engine_devices(two, 1, EIGHT, trains=False) == ["2", "3"]


@pytest.mark.parametrize(
    ("visible", "engine", "problem"),
    [
        ([], {}, None),
        ([], {"nodes": 2, "tensor_parallel": 2}, None),
        (EIGHT, {"nodes": 2, "tensor_parallel": 2}, "engine.nodes = 2: this machine is one node; set it to 1"),
        (EIGHT, {"expert_parallel": True}, None),
        # vLLM 0.32: a worker that lacks experts ends by a segmentation fault at the first request.
        ([], {"expert_parallel": True}, "engine.expert_parallel = true: vLLM's kernels for CPUs need all experts"),
        ([], {"expert_parallel": True, "kind": "sglang"}, None),
        ([], {"draft_tokens": 4}, None),
        (EIGHT, {"draft_tokens": 4}, "engine.draft_tokens = 4: vLLM's model runner for GPUs samples differently"),
        (EIGHT, {"count": 5}, "the run needs 9 GPUs, 8 are visible"),
        (EIGHT, {"count": 1, "tensor_parallel": 8}, "the run needs 12 GPUs, 8 are visible"),
        (EIGHT, {"count": 3, "tensor_parallel": 4, "placement": "colocated"}, "needs 12 GPUs, 8 are visible"),
        (EIGHT, {"tensor_parallel": 8, "urls": ["http://a:1"]}, None),
    ],
)
def test_four_ranks_and_engines_must_fit_on_a_machine(visible, engine, problem):
    found = gpu_problems(config(world_size=4, **engine), visible)
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]


def test_a_run_for_gpus_is_refused_on_a_machine_without():
    for_gpus = make_config(slurm={"gpu": "h100-80"})
    (problem,) = gpu_problems(for_gpus, [])
    assert problem.startswith(f"slurm.gpu = h100-80: the run needs GPUs, and {socket.gethostname()} shows none")
    assert gpu_problems(for_gpus, EIGHT) == []
    assert engine_devices(for_gpus, 0, []) == []


def test_a_host_is_an_address_of_this_machine():
    for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0"):
        assert devices.problems(make_config(engine={"host": host}, environment={"agent": "a:b", "host": host})) == []
    for host in ("192.0.2.1", "no-such-host.invalid", "256.1.1.1", "x" * 80):
        found = devices.problems(make_config(engine={"host": host}, environment={"agent": "a:b", "host": host}))
        assert found == [
            f"{name}.host = {host}: not an address of this machine; name one" for name in ("engine", "environment")
        ]
        assert (
            devices.problems(make_config(engine={"host": host, "urls": ["http://a:1"]}, environment={"host": host}))
            == []
        )


def test_cpus_compute_gated_delta_net_in_bf16(tmp_path):
    """vLLM 0.32 asserts it at the first request."""
    path = str(write_config(tmp_path, **QWEN3_5))
    for dtype in ("fp32", "bf16"):
        found = gpu_problems(make_config(model={"path": path}, engine={"dtype": dtype}), [])
        assert any(line.startswith("engine.dtype = fp32: vLLM's gated") for line in found) == (dtype == "fp32")


def test_an_evaluation_needs_gpus_only_for_its_engines():
    assert gpu_problems(config(world_size=8, count=8), EIGHT, trains=False) == []
    too_large = config(world_size=1, count=2, tensor_parallel=9)
    assert "engine.tensor_parallel = 9: " in "".join(gpu_problems(too_large, EIGHT, trains=False))
    assert fit_engines(too_large, EIGHT) is too_large


def test_colocated_engines_share_the_trainers_gpus():
    both = config(world_size=8, count=2, tensor_parallel=4, placement="colocated")
    assert engine_devices(both, 0, EIGHT) == EIGHT[:4]
    assert engine_devices(both, 1, EIGHT) == EIGHT[4:]
    assert gpu_problems(both, EIGHT) == []


def test_a_rank_that_should_have_a_gpu_does_not_train_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    require_gpu()  # where torch is for the CPU, every rank is
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    with pytest.raises(ExpectedError, match=f"no GPU is visible on {socket.gethostname()}"):
        require_gpu()


def test_a_port_in_use_is_refused(tree):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        tree["engine"]["port"] = taken.getsockname()[1]
        assert f"engine.port = {tree['engine']['port']}: already in use" in errors(tree)
