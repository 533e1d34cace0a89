import json
import logging
import math
import resource
import signal
import sys
from contextlib import closing

import pytest
import torch

from dppo_megatron.errors import MissingPackageError
from dppo_megatron.report.names import METRICS
from dppo_megatron.report.tail import read_records
from dppo_megatron.report.trackers import JsonlTracker, Trackers, build_trackers


def steps_of(path):
    return [record["step"] for record in read_records(path)]


def test_jsonl_line_has_step_time_and_metrics_in_strict_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(3, {"train/loss": 0.5, "train/grad_norm": math.nan, "policy/ratio_max": math.inf})
    tracker.close()
    record = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert record.pop("time") > 1e9
    assert record == {"step": 3, "train/loss": 0.5, "train/grad_norm": None, "policy/ratio_max": None}


@pytest.mark.parametrize(
    ("lines", "resume", "logged", "kept"),
    [([0, 1, 2, 3, 2, 4, "half"], 2, [3, 4], [0, 1, 2, 2, 3, 4]), ([1, "half"], 5, [2], [1, 2]), (None, 3, [4], [4])],
    ids=["later steps are removed, late evaluations kept", "an incomplete last line is cut", "without a file"],
)
def test_a_resumed_run_repeats_no_step(tmp_path, lines, resume, logged, kept):
    path = tmp_path / "metrics.jsonl"
    if lines is not None:
        path.write_text("\n".join('{"step": 2, "x' if n == "half" else json.dumps({"step": n}) for n in lines))
    tracker = JsonlTracker(path, resume_step=resume)
    for step in logged:
        tracker.log(step, {"train/loss": 1.0})
    assert steps_of(path) == kept  # readable at once, without close
    assert path.read_text().endswith("\n")


def test_a_fresh_run_keeps_an_older_file_under_another_name(tmp_path):
    for step in (1, 2, 3):
        JsonlTracker(tmp_path / "metrics.jsonl").log(step, {})
    found = {path.name: steps_of(path) for path in tmp_path.iterdir()}
    assert found == {"metrics.1.jsonl": [1], "metrics.2.jsonl": [2], "metrics.jsonl": [3]}


def test_a_full_disk_leaves_no_half_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(1, {"train/loss": 1.0})
    size = path.stat().st_size
    old_handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))
    try:
        with pytest.raises(OSError, match=r"step 2|too large"):
            tracker.log(2, {"train/loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old_handler)
    assert path.stat().st_size == size
    tracker.log(3, {"train/loss": 1.0})
    assert steps_of(path) == [1, 3]


class Recorder:
    def __init__(self, fails_at=None):
        self.seen, self.closed, self.fails_at = [], False, fails_at

    def log(self, step, metrics):
        if step == self.fails_at:
            raise RuntimeError("no network")
        self.seen.append((step, dict(metrics)))

    def close(self):
        self.closed = True


def test_fan_out_drops_a_failing_optional_tracker_and_goes_on(caplog):
    required, broken, sound = Recorder(), Recorder(fails_at=2), Recorder()
    with closing(Trackers(required, [broken, sound])) as trackers:
        for step in (1, 2, 3):
            trackers.log(step, {"train/loss": torch.tensor(0.5)})
    assert type(required.seen[0][1]["train/loss"]) is float
    with pytest.raises(RuntimeError, match="no network"):
        Trackers(Recorder(fails_at=1)).log(1, {})
    assert [s for s, _ in required.seen] == [s for s, _ in sound.seen] == [1, 2, 3]
    assert [s for s, _ in broken.seen] == [1]
    assert required.closed
    assert sound.closed
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "no network" in caplog.text


def test_build_opens_only_the_configured_trackers(config):
    settings = config()
    with closing(build_trackers(settings, None)) as trackers:
        trackers.log(1, {"train/loss": 1.0})
    assert [path.name for path in settings.run.dir.iterdir()] == ["metrics.jsonl"]


def tensorboard_scalars(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_events_read_back_and_resume_drops_repeated_steps(config):
    settings = config(tensorboard=True)
    with closing(build_trackers(settings, None)) as trackers:
        for step in (1, 2, 3, 4):
            trackers.log(step, {"train/loss": float(step)})
        trackers.log(0, {"eval/accuracy": 0.25})
    with closing(build_trackers(settings, 2)) as trackers:
        trackers.log(3, {"train/loss": 30.0})
    scalars = tensorboard_scalars(settings.run.dir / "tensorboard")
    assert scalars["train/loss"] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert scalars["eval/accuracy"] == [(0, 0.25)]


@pytest.mark.parametrize(("package", "asked"), [("tensorboard", True), ("wandb", "offline")])
def test_a_missing_package_is_named(config, monkeypatch, package, asked):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=rf"tracking.{package} = .*; pip install {package}, or set it to "):
        build_trackers(config(**{package: asked}), None)


def test_names_are_unique_and_documented():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert all(metric.unit and metric.meaning for metric in METRICS)
