"""CPUs near each GPU, on made-up /sys trees; and the binding of a task."""

import os
from pathlib import Path

import pytest

from dppo_megatron.run.slurm import binding, task
from dppo_megatron.run.slurm.binding import cpus_for, visible_gpus
from tests.support.configs import make_config

GPUS = ["0000:17:00.0", "0000:2a:00.0", "0000:97:00.0", "0000:ba:00.0"]  # two of each NUMA node


def machine(root: Path, near: dict[str, str], *, threads: dict[int, str] | None = None) -> Path:
    """A /sys with these local_cpulists of devices. threads: siblings by CPU."""
    for gpu, cpus in near.items():
        device = root / "bus/pci/devices" / gpu
        device.mkdir(parents=True)
        (device / "local_cpulist").write_text(cpus + "\n")
    for cpu, siblings in (threads or {}).items():
        topology = root / f"devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(siblings + "\n")
    return root


def two_sockets(root: Path, per_socket: int) -> Path:
    first, second = f"0-{per_socket - 1}", f"{per_socket}-{2 * per_socket - 1}"
    return machine(root, dict(zip(GPUS, (first, first, second, second), strict=True)))


@pytest.mark.parametrize(
    ("per_socket", "allowed", "shares"),
    [
        (8, range(16), [{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13, 14, 15}]),
        (5, range(10), [{0, 1}, {2, 3, 4}, {5, 6}, {7, 8, 9}]),  # an odd number of cores is used whole
        (8, range(2, 14), [{2, 3, 4}, {5, 6, 7}, {8, 9, 10}, {11, 12, 13}]),  # Slurm gave six CPUs of each socket
        (8, range(8), None),  # none near two of the GPUs
        (8, (0, 8, 9), None),  # one core for two GPUs
    ],
)
def test_two_gpus_of_a_numa_node_share_its_cpus_evenly(tmp_path, per_socket, allowed, shares):
    assert cpus_for(GPUS, set(allowed), two_sockets(tmp_path, per_socket)) == shares


@pytest.mark.parametrize("siblings", [lambda c: (c % 8, c % 8 + 8), lambda c: (c // 2 * 2, c // 2 * 2 + 1)])
def test_the_threads_of_a_core_stay_together(tmp_path, siblings):
    """Numbered as most machines do (0 and 8 are one core), and next to each other."""
    threads = {cpu: ",".join(map(str, siblings(cpu))) for cpu in range(16)}
    first, second = cpus_for(
        GPUS[:2], set(range(16)), machine(tmp_path, dict.fromkeys(GPUS[:2], "0-15"), threads=threads)
    )
    assert len(first) == len(second) == 8
    assert first.isdisjoint(second)
    assert all(set(siblings(cpu)) <= first for cpu in first)


def test_a_thread_that_slurm_did_not_give_is_not_used(tmp_path):
    root = machine(tmp_path, {GPUS[0]: "0-3"}, threads={0: "0,2", 2: "0,2", 1: "1,3", 3: "1,3"})
    assert cpus_for(GPUS[:1], {0, 1, 3}, root) == [{0, 1, 3}]


def test_without_local_cpulist_nothing_is_bound(tmp_path):
    root = two_sockets(tmp_path, 8)
    (root / "bus/pci/devices" / GPUS[2] / "local_cpulist").unlink()
    assert cpus_for(GPUS, set(range(16)), root) is None
    assert cpus_for(GPUS, set(range(16)), tmp_path / "absent") is None


@pytest.fixture
def node(tmp_path, program, monkeypatch) -> list[set[int]]:
    """A node with four GPUs and 16 CPUs, two tasks of a step on it; the CPU sets that this process is bound to."""
    rows = "\n".join(f"{i}, GPU-{i}0aa, 0000{gpu.upper()}" for i, gpu in enumerate(GPUS))
    program("nvidia-smi", f"cat <<E\n{rows}\nE")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    root = two_sockets(tmp_path / "sys", 8)
    monkeypatch.setattr(binding.cpus_for, "__defaults__", (root,))
    bound: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: bound[-1] if bound else set(range(16)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: bound.append(cpus))
    return bound


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("", GPUS), ("2,0", [GPUS[2], GPUS[0]]), ("GPU-30aa,GPU-1", [GPUS[3], GPUS[1]]), ("MIG-7", [])],
)
def test_visible_gpus_are_in_the_order_of_cuda(node, monkeypatch, visible, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus() == expected


def test_without_nvidia_smi_no_gpu_is_known(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert visible_gpus() == []
    assert binding.bind_to_gpus("trainer-0", 0, 1, 1) is False


@pytest.fixture
def children(child_environments, monkeypatch) -> list[dict]:
    """Environments of the children that tasks start."""
    monkeypatch.setattr(task.Task, "current", lambda: task.Task(3, 4, 1, 2, "node1", "7.0-0"))
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    return child_environments


def start(monkeypatch, role: str, first_gpu: int = 0, parallel=None, **slurm) -> None:
    config = make_config(slurm=slurm, engine={"tensor_parallel": 2}, parallel=parallel or {})
    monkeypatch.setattr(task, "load_config", lambda path: config)
    assert task.run_task(role, Path("config.yaml"), resume=False, index=0, first_gpu=first_gpu) == 0


def test_a_rank_is_bound_near_its_gpu_and_has_a_thread_for_each_of_its_cpus(node, children, monkeypatch, capsys):
    start(monkeypatch, "trainer")
    assert node == [{4, 5, 6, 7}]
    assert (children[0]["OMP_NUM_THREADS"], children[0]["OMP_WAIT_POLICY"]) == ("4", "PASSIVE")
    assert "trainer-3 on" in (line := capsys.readouterr().out)
    assert line.endswith("GPU 0000:2a:00.0, CPUs [4, 5, 6, 7]\n")


def test_an_engine_is_bound_near_all_of_its_gpus(node, children, monkeypatch):
    start(monkeypatch, "engine", first_gpu=2)
    assert node == [set(range(8, 16))]


@pytest.mark.parametrize(("bind", "visible"), [("none", "0,1,2,3"), ("auto", "1")])
def test_a_rank_is_not_bound_with_bind_none_or_if_slurm_shows_it_one_gpu(node, children, monkeypatch, bind, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    start(monkeypatch, "trainer", bind=bind)
    assert node == []
    assert children[0]["OMP_NUM_THREADS"] == "8"  # 16 CPUs, two tasks


def test_the_first_of_two_tasks_that_sees_only_its_own_gpu_is_not_bound(node, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert not binding.bind_to_gpus("trainer-0", 0, 1, 2)
    assert node == []


def test_tasks_without_gpus_are_not_bound(node, children, monkeypatch):
    start(monkeypatch, "orchestrator")
    assert node == []


def test_a_tensor_parallel_rank_has_one_hardware_queue_for_its_gpu(children, monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")  # no nvidia-smi
    start(monkeypatch, "trainer", parallel={"world_size": 4, "tensor": 2})
    (environment,) = children
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert environment["MASTER_PORT"] == "20000"
