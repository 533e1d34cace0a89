"""Checks of a process on its node, with an nvidia-smi of the test's on PATH."""

import resource
import subprocess
import sys

import pytest
import torch

from dppo_megatron.run.preflight import node
from dppo_megatron.run.preflight.node import Observed, gpu_rows, judge_gpu, look_at_files, look_at_gpus, look_at_limits
from dppo_megatron.run.preflight.task import wrong_rows
from tests.support.configs import make_config

ROWS = [[str(i), f"GPU-{i}", "NVIDIA H100", "580.65.06", "4"] for i in range(4)]


def judged(rows, local_rank, visible="", cuda="13.0", monkeypatch=None) -> Observed:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    out = Observed()
    judge_gpu(out, rows, local_rank, cuda, trains=True)
    return out


@pytest.mark.parametrize("trains", [True, False])
def test_without_nvidia_smi_no_gpu_is_missing(monkeypatch, trains):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    look_at_gpus(out := Observed(), 0, "13.0", trains=trains)
    assert out.faults == []
    assert out.warnings == ["GPUs not checked: nvidia-smi is not installed"]


def test_a_node_that_serves_answers_for_all_its_gpus(monkeypatch, program):
    rows = "\n".join(", ".join([*row[:4], "9000" if row[0] == "3" else "4"]) for row in ROWS)
    program("nvidia-smi", f"echo '{rows}'")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    look_at_gpus(out := Observed(), 1, "13.0", trains=False)
    assert out.faults == ["GPU GPU-3: another process uses 9000 MiB of it"]
    look_at_gpus(alone := Observed(), 1, "13.0", trains=True)
    assert (alone.faults, alone.gpu) == ([], "GPU-1")


@pytest.mark.parametrize(
    ("visible", "local_rank", "gpu"),
    [
        ("", 2, "GPU-2"),
        ("2,3", 1, "GPU-3"),
        ("GPU-1,GPU-0", 1, "GPU-0"),
        ("3", 3, "GPU-3"),  # bound by Slurm to one
    ],
)
def test_the_gpu_of_a_rank(visible, local_rank, gpu, monkeypatch):
    out = judged(ROWS, local_rank, visible, monkeypatch=monkeypatch)
    assert (out.gpu, out.same) == (gpu, {"driver": "580.65.06", "GPU": "NVIDIA H100"})
    assert out.problems == out.faults == []


def test_a_gpu_that_fell_off_the_bus(monkeypatch):
    (fault,) = judged(ROWS[:3], 3, "0,1,2,3", monkeypatch=monkeypatch).faults
    assert fault == "GPU 3 is missing: nvidia-smi lists 3, this process has 0,1,2,3"


def test_memory_of_another_process(monkeypatch):
    (fault,) = judged([[*ROWS[0][:4], "20480"]], 0, monkeypatch=monkeypatch).faults
    assert fault == "GPU GPU-0: another process uses 20480 MiB of it"


@pytest.mark.parametrize(
    ("driver", "cuda", "wrong"),
    [
        ("570.86.15", "13.0", True),
        ("580.65.06", "13.0", False),
        ("570.86.15", "12.8", False),
        ("470.82.01", "12.8", True),
        ("470.82.01", None, False),
    ],
)
def test_the_driver_must_be_new_enough_for_torchs_cuda(driver, cuda, wrong, monkeypatch):
    out = judged([[*ROWS[0][:3], driver, "4"]], 0, cuda=cuda, monkeypatch=monkeypatch)
    assert [f"driver {driver}: torch for CUDA {cuda}" in text for text in out.problems] == [True] * wrong


def test_nvidia_smi_fails_hangs_or_is_not_installed(program, monkeypatch):
    out = Observed()
    program("nvidia-smi", "echo 'Unable to determine the device handle for GPU0'; exit 15")
    assert gpu_rows(out) == []
    monkeypatch.setattr(node, "NVIDIA_SMI_S", 0.2)
    program("nvidia-smi", "exec sleep 5")
    assert gpu_rows(out) == []
    assert out.faults[0] == "Unable to determine the device handle for GPU0"
    assert "timed out after 0.2 seconds" in out.faults[1]
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpu_rows(out) == []
    assert out.warnings == ["GPUs not checked: nvidia-smi is not installed"]


def test_low_limits_are_warnings(monkeypatch):
    limits = {resource.RLIMIT_MEMLOCK: (8 << 20, 8 << 20), resource.RLIMIT_NOFILE: (1024, 1024)}
    monkeypatch.setattr(node.resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(node.os.path, "isdir", lambda path: False)
    out = Observed()
    look_at_limits(out)
    assert [text.partition(":")[0] for text in out.warnings] == [
        "/dev/shm has 0 MiB", "ulimit -l is 8192 KiB", "ulimit -Hn is 1024",
    ]  # fmt: skip


def test_files_that_a_node_sees(tmp_path, monkeypatch):
    monkeypatch.setattr(node, "VISIBLE_S", 0.1)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    config = make_config(
        run={"dir": str(tmp_path)},
        model={"path": str(tmp_path / "model")},
        data={"train": str(tmp_path / "rows.jsonl")},
    )
    serving, training, seen = Observed(), Observed(), Observed()
    look_at_files(serving, config, "7", "a", trains=False)
    look_at_files(training, config, "7", "a", trains=True)
    unseen = f"run.dir = {tmp_path}: a file that the driver wrote there is not visible; is it shared?"
    assert serving.problems == [unseen]
    assert training.problems == [f"{tmp_path / 'rows.jsonl'}: does not exist", unseen]
    (tmp_path / ".preflight-7").touch()
    look_at_files(seen, config, "7", "a", trains=False)
    assert (seen.problems, seen.same) == ([], {str(tmp_path / "model"): "1 files"})
    assert {path.name for path in tmp_path.iterdir()} == {"model", ".preflight-7"}


def test_a_file_that_grows_no_further_is_a_problem(tmp_path):
    """The check runs in a process that may write at most 1 MiB, as with a quota."""
    (tmp_path / ".preflight-7").touch()
    script = f"""
import resource, signal
from tests.run.preflight.test_node import *
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
out = Observed()
look_at_files(out, make_config(run={{"dir": "{tmp_path}"}}, model={{"path": "{tmp_path}"}}), "7", "a", trains=False)
print(*out.problems)
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said == f"run.dir = {tmp_path}: cannot be written: File too large\n"


def test_a_wrong_row_names_the_member_it_came_from():
    values = torch.tensor([[1.0, 1.0], [2.0, 2.5], [3.0, 3.0]])
    assert wrong_rows(values) == [1]
