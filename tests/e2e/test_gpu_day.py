"""The script of GPU checks states why it skips without GPUs; its parts run on tiny shapes."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.runs import environment

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_day.py"


def day(*arguments: str | Path) -> subprocess.CompletedProcess:
    command = [sys.executable, SCRIPT, *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=900)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device: `make test-gpu` runs all of it")
def test_without_a_gpu_every_part_reports_why_it_is_skipped(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    from gpu_day import PARTS

    found = day("--output", tmp_path)
    assert found.returncode == 0, found.stderr
    skipped = {line.split()[0] for line in found.stdout.splitlines() if "skipped: no CUDA device" in line}
    assert {part.name for part in PARTS} <= skipped
    assert not list(tmp_path.iterdir())


def test_no_part_starts_without_its_devices_or_when_the_time_is_over(tmp_path):
    found = day("--device", "cpu", "--devices", "2", "--budget-s", "0", "--output", tmp_path)
    assert found.returncode == 0, found.stderr
    for part in ("actor", "offload"):  # as it comes, and in the table at the end
        assert sum(line.startswith(part) and "skipped: 0 s are over" in line for line in found.stdout.splitlines()) == 2
    skipped = {line.split()[0]: line for line in found.stdout.splitlines() if "skipped: " in line}
    assert "it needs 4 devices, and here are 2" in skipped["mesh"]
    assert "it needs 3 devices, and here are 2" in skipped["vllm_tp2"]
    assert "0 s are over" in skipped["broadcast"]


@pytest.mark.slow
def test_a_run_without_values_is_no_measurement(tmp_path):
    found = day("--device", "cpu", "--no-values", "--only", "correctness", "broadcast", "--output", tmp_path)
    assert found.returncode == 0, found.stdout
    (written,) = tmp_path.iterdir()
    assert written.name.endswith("-cpu-dry-run-values-not-checked.txt")
    text = written.read_text()
    assert text.splitlines()[1].startswith("VALUES NOT CHECKED")
    assert "skipped: it only compares values" in text
    assert "fingerprints of 64 layers: not compared" in text
    assert " s  ran " in text
    assert " s  ok " not in text


def _seen(**gradient: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: factor * torch.randn(8, generator=generator) for name, factor in gradient.items()}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"gradient": _seen(a=1.0, b=0.98e-2)}, "gradients of 1 tensors beyond their bounds: b"),
        ({"logprobs": [torch.full((4,), -2.0 + 2e-3)]}, "log-probs differ"),
        ({"loss": 0.1 + 2e-4}, "the loss differs"),
    ],
)
@pytest.mark.parametrize("checked", [True, False])
def test_a_layout_that_computes_otherwise_is_wrong(monkeypatch, change, problem, checked):
    """A wrong gradient of one small tensor is found; without values no check runs."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import gpu_ranks
    import gpu_values

    monkeypatch.setenv(gpu_values.VARIABLE, "0" if checked else "1")
    one = gpu_ranks.Seen([torch.full((4,), -2.0)], 0.1, _seen(a=1.0, b=1e-2))
    problems = gpu_values.Problems()
    gpu_ranks._compare(problems, gpu_ranks.CASES["tp2"][0], "fp32", replace(one, **change), one, one)
    if problem is None or not checked:
        problems.end()
        return
    with pytest.raises(SystemExit, match=problem):
        problems.end()


@pytest.mark.slow
def test_the_parts_that_train_run_on_tiny_shapes(tmp_path):
    # tests/null_gpu/test_gpu_day.py runs others.
    parts = ("correctness", "time_by_kernel", "checkpoint", "sdpa", "broadcast")
    found = day("--device", "cpu", "--only", *parts, "--output", tmp_path)
    assert found.returncode == 0, found.stdout
    (written,) = tmp_path.glob("*-cpu-dry-run-gpu-day.txt")
    text = written.read_text()
    assert text.count(" s  ok ") == len(parts), text
    for expected in (
        *("date: ", "versions: Python", "tokens/s"),
        *("tensors, 63 changed by another update, 0 differ after loading", "profiled update"),
        *("_scaled_dot_product_flash_attention_for_cpu_backward", "from math in fp32"),
        *("receiver 1 killed in a bucket", "after the loss: fingerprints of 64 layers: the same on 1 receivers"),
    ):
        assert expected in text, expected


def test_a_result_names_a_commit_of_main_and_each_difference_to_the_lock(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import gpu_machine

    def git(*command: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.check_output(["git", "-C", tmp_path, *who, *command], text=True).strip()

    git("init", "--quiet", "--initial-branch=main")
    (tmp_path / "setup.py").write_text("1")
    git("add", ".")
    git("commit", "--quiet", "--message=one")
    of_main = git("rev-parse", "HEAD")[:12]
    assert gpu_machine.commit(tmp_path) == of_main
    git("checkout", "--quiet", "-b", "topic")
    (tmp_path / "setup.py").write_text("2")
    git("commit", "--quiet", "--all", "--message=two")
    assert gpu_machine.commit(tmp_path) == f"{of_main}, with changes in setup.py"

    lock = tmp_path / "some.lock"
    lock.write_text(f"# a==1\nnumpy==0.1\ntorch=={torch.__version__}\nno-such==3\n")
    instead, absent = gpu_machine.differences_to(lock)
    assert instead.startswith("installed instead of the version of some.lock: numpy ")
    assert instead.endswith(" (0.1)")
    assert absent == "absent of some.lock: no-such"
