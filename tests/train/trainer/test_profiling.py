"""Traces of chosen steps, and ranges of the phases that the metrics time."""

import gzip
import json
from types import SimpleNamespace

import pytest
import torch

from dppo_megatron.config.schema import ProfileConfig
from dppo_megatron.report import profiling
from dppo_megatron.report.profiling import StepProfiler, phase
from tests.support.tiny_task import STEPS
from tests.train.trainer.scenarios import train_cases

PHASES = {"wait", "read", "recompute", "forward_backward", "optimizer"}  # of a step on a bank with an old policy


def names(path) -> set[str]:
    with gzip.open(path, "rt") as file:
        return {event.get("name") for event in json.load(file)["traceEvents"]}


@pytest.fixture(scope="module")
def trained(ranks, task, tmp_path_factory):
    """The records of both ranks for a run without and one with `profile`, and the run's directory."""
    directory = tmp_path_factory.mktemp("ranks")
    shared = {"objective": {"name": "dppo_topk_tv", "settings": {"anchor": "old"}}, "parallel": {"world_size": 2}}
    cases = {"plain": shared, "traced": shared | {"profile": {"steps": [STEPS], "ranks": [1], "memory": True}}}
    return ranks(2).run(train_cases, cases=cases, task=task, directory=directory), task / "run" / "profile"


def test_the_chosen_step_of_the_chosen_rank_is_traced_with_its_phases(trained):
    _, directory = trained
    assert [path.name for path in directory.iterdir()] == ["step_3_rank_1.json.gz"]
    found = names(directory / "step_3_rank_1.json.gz")
    assert found >= PHASES
    assert "aten::mm" in found


def test_a_trace_changes_no_bit_of_the_run(trained):
    for of_rank in trained[0]:
        plain, traced = of_rank["plain"], of_rank["traced"]
        assert traced["updates"] == plain["updates"]
        assert all(map(torch.equal, traced["weights"], plain["weights"]))


def test_every_step_records_flops_and_no_mfu_on_cpus(trained):
    records = trained[0][0]["traced"]["records"]
    assert len(records) == STEPS
    assert all(record["throughput/tflops_per_gpu"] > 0 for record in records)
    assert not any("throughput/mfu" in record for record in records)


def test_a_directory_that_cannot_be_written_stops_no_run(tmp_path, caplog):
    (tmp_path / "profile").touch()
    profiler = StepProfiler(ProfileConfig(steps=(1,)), tmp_path / "profile", rank=0)
    profiler.begin(1)
    profiler.end()
    profiler.end()
    assert "step_1_rank_0: no trace is written" in caplog.text


def test_without_cuda_a_memory_snapshot_is_left_out_and_reported(tmp_path, caplog):
    StepProfiler(ProfileConfig(steps=(1,), memory=True), tmp_path, rank=1)
    assert not caplog.records  # this rank writes nothing
    StepProfiler(ProfileConfig(steps=(1,), memory=True), tmp_path, rank=0)
    assert "profile.memory = true: there is no CUDA device" in caplog.text


def test_memory_is_recorded_from_begin_to_end(tmp_path, monkeypatch):
    """The calls, on a stand-in for torch.cuda: no GPU is here."""
    calls = []
    memory = SimpleNamespace(
        _record_memory_history=lambda **how: calls.append(how), _dump_snapshot=lambda path: calls.append(path)
    )
    cuda = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: False, memory=memory)
    monkeypatch.setattr(profiling.torch, "cuda", cuda)
    profiler = StepProfiler(ProfileConfig(steps=(4,), memory=True), tmp_path, rank=0)
    profiler.begin(3)
    profiler.end()
    assert calls == []
    monkeypatch.setattr(profiling, "profile", lambda: SimpleNamespace(start=int, stop=int, export_chrome_trace=str))
    profiler.begin(4)
    profiler.end()
    assert calls == [{"max_entries": profiling.EVENTS}, str(tmp_path / "step_4_rank_0.pickle"), {"enabled": None}]


def test_ranges_are_of_nvtx_where_cuda_is_in_use(monkeypatch):
    pushed = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: pushed.append(name))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: pushed.append("end"))
    with phase("publish") as timed:
        assert pushed == ["publish"]
        assert timed.seconds == 0
    assert pushed == ["publish", "end"]
    assert timed.seconds > 0
