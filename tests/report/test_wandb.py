"""wandb itself, run in offline mode and online without login or network."""

import logging
import re
from contextlib import closing

import pytest

from dppo_megatron.common.retry import wait_until
from dppo_megatron.report import trackers as module
from dppo_megatron.report.trackers import build_trackers

pytest.importorskip("wandb")


@pytest.fixture(autouse=True)
def stranger(tmp_path, monkeypatch):
    """A machine that wandb has never seen: no key, no settings of the user's."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_RUN_ID", "WANDB_PROJECT", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "wandb_home"))


def offline_runs(run_dir):
    return sorted((run_dir / "wandb").glob("offline-run-*/run-*.wandb"))


def test_offline_writes_files_takes_late_evaluations_and_resumes_the_same_id(config):
    settings = config(wandb="offline", wandb_project="p", wandb_name="n")
    with closing(build_trackers(settings, None)) as trackers:
        for step in (1, 2, 3):
            trackers.log(step, {"train/loss": 0.5})
        trackers.log(1, {"eval/accuracy": 0.75})
    run_id = (settings.run.dir / "wandb_id").read_text().strip()
    (first,) = offline_runs(settings.run.dir)
    assert first.name == f"run-{run_id}.wandb"
    # wandb's own process writes the file a little later.
    assert wait_until(lambda: b"eval/accuracy" in first.read_bytes(), timeout_s=20, poll_s=0.05)

    build_trackers(settings, 2).close()
    assert (settings.run.dir / "wandb_id").read_text().strip() == run_id
    assert {path.name for path in offline_runs(settings.run.dir)} == {first.name}

    module._run_id(settings.run.dir, fresh=True)
    assert (settings.run.dir / "wandb_id").read_text().strip() != run_id


@pytest.mark.parametrize("case", ["no login", pytest.param("no network", marks=pytest.mark.slow)])
def test_online_that_cannot_work_warns_and_goes_on_offline(config, monkeypatch, caplog, case):
    monkeypatch.setattr(module, "CONNECT_TIMEOUT_S", 2.0)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    if case == "no network":
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    caplog.set_level(logging.INFO)
    settings = config(wandb="online")
    with closing(build_trackers(settings, None)) as trackers:
        trackers.log(1, {"train/loss": 0.5})
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len([w for w in warnings if w.startswith("wandb online failed, training continues:")]) == 1
    assert re.search(r"upload with: wandb sync \S+", caplog.text)
    (path,) = offline_runs(settings.run.dir)
    assert path.stem == "run-" + (settings.run.dir / "wandb_id").read_text().strip()


def test_wandb_that_cannot_start_at_all_is_a_warning(config, monkeypatch, caplog):
    import wandb

    def init(**_):
        raise OSError("read-only file system")

    monkeypatch.setattr(wandb, "init", init)
    with closing(build_trackers(config(wandb="offline"), None)) as trackers:
        trackers.log(1, {"train/loss": 0.5})
    assert "wandb offline failed, training continues: read-only file system" in caplog.text
