"""`eval` with children that start nothing: which engines it queries, and which GPUs it gives them."""

from __future__ import annotations

import pytest

from dppo_megatron.config import Config, ConfigError
from dppo_megatron.fleet.registry import register
from dppo_megatron.launch import evaluate, local_processes
from dppo_megatron.run_dir import RunDir
from tests.support.configs import make_config


@pytest.fixture
def config(tmp_path) -> Config:
    return make_config(run={"dir": tmp_path / "run"}, data={"train": "t", "eval": "e"}, engine={"count": 2})


@pytest.fixture
def queried(monkeypatch) -> list[str]:
    """URLs of the engines that evaluations query."""
    urls = []

    class Child:
        def __init__(self, name, command, log, env, lock):
            register(RunDir(log.parents[1]), name, f"http://{log.parents[1].name}/{env['CUDA_VISIBLE_DEVICES']}", 1)

        def signal(self, number):
            pass

        def end(self, grace_s):
            pass

    class Engine:
        async def close(self):
            pass

    async def evaluate_once(config, engines, policy, version):
        return {"heldout": {"eval/accuracy": 0.5}}

    monkeypatch.setattr(local_processes, "Child", Child)
    monkeypatch.setattr(evaluate, "build_engine", lambda config, url: urls.append(url) or Engine())
    monkeypatch.setattr(evaluate, "evaluate_once", evaluate_once)
    for module in (evaluate, local_processes):
        monkeypatch.setattr(module, "visible_devices", lambda: ["4", "6"])
    return urls


def model(directory):
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    return directory


def test_models_of_one_name_have_engines_of_their_own(config, queried, tmp_path):
    """An evaluation that still runs has registered its engines, which serve another model."""
    for run in ("a", "b"):
        found = evaluate.evaluate_model(config, model(tmp_path / run / "model"), "config.yaml")
        assert found == {"heldout": {"eval/accuracy": 0.5}}
    assert queried == ["http://model-1/4", "http://model-1/6", "http://model-2/4", "http://model-2/6"]


@pytest.mark.parametrize("change", [{"objective": {"name": "nll"}}, {"rollout": {"bank": "bank"}}])
def test_runs_without_engines_of_their_own_are_evaluated(config, queried, tmp_path, change):
    config = Config.model_validate(config.model_dump() | change)
    assert not config.samples
    evaluate.evaluate_model(config, model(tmp_path / "model"), "config.yaml")
    assert queried == ["http://model-1/4", "http://model-1/6"]


def test_engines_that_do_not_fit_the_gpus_are_refused(config, queried, tmp_path):
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"count": 3})})
    with pytest.raises(ConfigError, match=r"engine.count = 3: .* need 3 GPUs, 2 are visible"):
        evaluate.evaluate_model(config, model(tmp_path / "model"), "config.yaml")
    assert queried == []
