"""A run that is killed between a checkpoint and the record of its step has that record after it was resumed."""

import json
import shutil
import tracemalloc
from types import SimpleNamespace

import pytest

from dppo_megatron.report.tail import read_metrics
from dppo_megatron.run_dir import RunDir
from dppo_megatron.train.trainer.checkpoints import Checkpoints
from dppo_megatron.train.trainer.recorder import RankZeroRecorder
from tests.support.configs import make_config

STEP = {"train/loss": 0.5, "train/lr": float("nan"), "time/step_s": 2.0}


class OneCheckpoint:
    """An actor that keeps the state of its checkpoint, as JSON."""

    layout = SimpleNamespace(rank=0)

    def save_checkpoint(self, directory, step, state, keep):
        self.state = json.dumps(state, allow_nan=False)

    def load_checkpoint(self, directory):
        return json.loads(self.state)


@pytest.mark.parametrize("recorded", [False, True])
def test_the_record_of_a_checkpoints_step_is_there_once_after_a_kill(tmp_path, recorded):
    config, actor = make_config(run={"dir": tmp_path}, checkpoint={"every": 2}), OneCheckpoint()

    def decode(token):
        return str(token)

    with RankZeroRecorder(config, 0, None, decode) as recorder:
        recorder.log(1, STEP)
        Checkpoints(config, actor).save(2, STEP)
        recorder.log(2, {"rollout/reward_mean": 1.0})  # no record of a step
        if recorded:
            recorder.log(2, STEP)
    checkpoints = Checkpoints(config, actor)
    with RankZeroRecorder(config, 0, checkpoints.load_latest(), decode) as recorder:
        recorder.log_missing(2, checkpoints.metrics)
    steps = [record for record in read_metrics(RunDir(tmp_path).metrics) if "train/loss" in record]
    assert [record["step"] for record in steps] == [1, 2]
    assert {name: steps[1][name] for name in STEP} == {**STEP, "train/lr": None}


def test_a_checkpoint_of_an_earlier_version_has_no_record(tmp_path):
    config, actor = make_config(run={"dir": tmp_path}), OneCheckpoint()
    Checkpoints(config, actor).save(2)
    actor.state = json.dumps({k: v for k, v in json.loads(actor.state).items() if k != "metrics"})
    checkpoints = Checkpoints(config, actor)
    with RankZeroRecorder(config, 0, checkpoints.load_latest(), str) as recorder:
        recorder.log_missing(2, checkpoints.metrics)
    assert read_metrics(RunDir(tmp_path).metrics) == []


def test_a_checkpoint_is_due_every_so_many_steps_and_after_the_last(tmp_path):
    config = make_config(run={"dir": tmp_path}, train={"steps": 5}, checkpoint={"every": 2})
    assert list(filter(Checkpoints(config, OneCheckpoint()).due, range(1, 6))) == [2, 4, 5]


def test_an_evaluation_of_an_earlier_attempt_is_logged_once(tmp_path):
    config, evaluated = make_config(run={"dir": tmp_path}), {"step": 1, "eval/accuracy": 0.5}
    RunDir(tmp_path).rollout_metrics.write_text(json.dumps(evaluated) + "\n")
    for resumed in (None, 1):
        with RankZeroRecorder(config, 0, resumed, str) as recorder:
            recorder.log((resumed or 0) + 1, STEP)
    logged = [record for record in read_metrics(RunDir(tmp_path).metrics) if "eval/accuracy" in record]
    assert [record["step"] for record in logged] == [1]


def test_a_resume_logs_the_sampling_of_later_steps_and_new_evaluations_once(tmp_path):
    config, run = make_config(run={"dir": tmp_path}), RunDir(tmp_path)
    sampled = [{"step": step, "time/generate_s": 1.0} for step in range(1, 1001)]
    evaluations = [{"step": step, "eval/accuracy": 0.5} for step in (3, 500, 997, 999)]
    run.rollout_metrics.write_text("".join(json.dumps(record) + "\n" for record in sampled + evaluations))
    earlier = [{"step": step, **STEP, "train/lr": 0.5} for step in range(1, 1001)] + evaluations[:2]
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in earlier))
    with RankZeroRecorder(config, 0, 998, str) as recorder:
        recorder.log_missing(998, STEP)  # recorded
        recorder.log(999, STEP)
    logged = [(record["step"], sorted(record)[0]) for record in read_metrics(run.metrics)]
    assert logged[:-5] == [(record["step"], sorted(record)[0]) for record in earlier if record["step"] <= 998]
    assert logged[-5:] == [
        *((step, "step") for step in (999, 1000)),
        *((step, "eval/accuracy") for step in (997, 999)),
        (999, "step"),
    ]


def test_earlier_records_take_no_memory(tmp_path):
    """10,000 steps would take 84 MB on every rank."""
    config, sizes = make_config(run={"dir": tmp_path}), {}
    row = {"train/loss": 0.5, **{f"metric/{number}": 0.1 * number for number in range(100)}}
    run = RunDir(tmp_path)
    run.metrics.write_text("".join(json.dumps({"step": s, **row}) + "\n" for s in range(1, 3001)))
    shutil.copy(run.metrics, run.rollout_metrics)
    for rank in (0, 1):
        tracemalloc.start()
        with RankZeroRecorder(config, rank, 2900, str) as recorder:
            sizes[rank] = tracemalloc.get_traced_memory()[0]
            recorder.log(2901, STEP)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < run.metrics.stat().st_size  # the newest steps and the 100 that are repeated
    assert sizes[0] - sizes[1] < 100_000
    assert sizes[1] < 100_000
