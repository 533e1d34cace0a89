"""What a task of a job step starts its child with."""

from __future__ import annotations

import pytest

from dppo_megatron.slurm import task
from tests.support.configs import make_config


@pytest.fixture
def children(child_environments, monkeypatch) -> list[dict]:
    """Environments of the children that tasks would start."""
    monkeypatch.setattr(task, "load_config", lambda path: make_config(parallel={"world_size": 2, "tensor": 2}))
    monkeypatch.setattr(task.Task, "of_this_process", lambda: task.Task(0, 2, 0, 2, "node1", "7.0-0"))
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")  # no nvidia-smi
    return child_environments


def test_a_tensor_parallel_rank_has_one_hardware_queue_for_its_gpu(children, tmp_path):
    assert task.run_task("trainer", tmp_path / "config.yaml", resume=False, index=0, first_gpu=0) == 0
    (environment,) = children
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert environment["MASTER_PORT"] == "20000"
