"""A synthetic run, and the smallest config that opens trackers."""

import json
from pathlib import Path

import pytest
import yaml

from tests.support.configs import make_config
from tests.support.records import step_record


@pytest.fixture
def config(tmp_path):
    """Builds a config whose run directory is below tmp_path, with the given tracking settings."""

    return lambda **tracking: make_config(run={"dir": tmp_path / "run"}, tracking=tracking)


@pytest.fixture
def make_run(tmp_path):
    """Writes a run directory of `steps` steps with evaluations before and after."""

    def make(name: str, method: str = "dppo_binary_tv", steps: int = 20, **settings) -> Path:
        run = tmp_path / name
        run.mkdir()
        config = {
            "objective": {"name": method, "settings": settings},
            "optimizer": {"lr": 1e-4},
            "train": {"steps": steps},
            "parallel": {"world_size": 2, "tensor": 2, "pipeline": 1, "context": 1},
        }
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        records = [{"step": 0, "time": 1000.0, "eval/accuracy": 0.25}]
        records += [step_record(step, 1000.0 + 2 * step) for step in range(1, steps + 1)]
        records += [{"step": steps, "time": 1001.0 + 2 * steps, "eval/accuracy": 0.75, "time/eval_s": 1.0}]
        (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return run

    return make
