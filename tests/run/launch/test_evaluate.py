"""`eval` with children that start nothing: which engines it queries, and which GPUs it gives them."""

from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from dppo_megatron.config import Config, ConfigError, read_config
from dppo_megatron.hf import ModelError
from dppo_megatron.rollout.fleet.registry import register
from dppo_megatron.run.checks import settings_problems
from dppo_megatron.run.checks.devices import fit_engines, gpu_problems
from dppo_megatron.run.launch import evaluate, local_processes
from dppo_megatron.run.launch.local_processes import engine_plans
from dppo_megatron.run.launch.sample import sampling_only
from dppo_megatron.run_dir import RunDir
from tests.support.configs import make_config

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def config(tmp_path) -> Config:
    return make_config(run={"dir": tmp_path / "run"}, data={"train": "t", "eval": "e"}, engine={"count": 2})


@pytest.fixture
def queried(monkeypatch) -> list[str]:
    """URLs of the engines that evaluations query."""
    urls = []

    def child(name, command, log, env, lock):
        gpus = env["CUDA_VISIBLE_DEVICES"].replace(",", "-")
        register(RunDir(log.parents[1]), name, f"http://{log.parents[1].name}.{gpus}", 1)
        return Mock()

    monkeypatch.setattr(local_processes, "Child", child)
    monkeypatch.setattr(evaluate, "build_engine", lambda config, url: urls.append(url) or AsyncMock())
    monkeypatch.setattr(evaluate, "evaluate_once", AsyncMock(return_value={"heldout": {"eval/accuracy": 0.5}}))
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
    assert queried == ["http://model-1.4", "http://model-1.6", "http://model-2.4", "http://model-2.6"]


@pytest.mark.parametrize("change", [{"objective": {"name": "nll"}}, {"rollout": {"bank": "bank"}}])
def test_runs_without_engines_of_their_own_are_evaluated(config, queried, tmp_path, change):
    config = Config.model_validate(config.model_dump() | change)
    assert not config.samples
    evaluate.evaluate_model(config, model(tmp_path / "model"), "config.yaml")
    assert queried == ["http://model-1.4", "http://model-1.6"]


@pytest.mark.parametrize(
    ("engine", "each"),
    [({"count": 3}, ["4", "6"]), ({"count": 8, "tensor_parallel": 2}, ["4-6"]), ({"tensor_parallel": 3}, None)],
)
def test_as_many_engines_start_as_the_gpus_hold(config, queried, tmp_path, capsys, engine, each):
    config = evaluate.with_settings(config, engine=engine)
    if each is None:
        with pytest.raises(ConfigError, match=r"engine.tensor_parallel = 3: .* needs 3 GPUs, 2 are visible; lower one"):
            evaluate.evaluate_model(config, model(tmp_path / "model"), "config.yaml")
    else:
        evaluate.evaluate_model(config, model(tmp_path / "model"), "config.yaml")
        said = f"engine.count = {engine['count']}: 2 GPUs are visible; lowered to {len(each)}\n"
        assert capsys.readouterr().out == said
    assert queried == [f"http://model-1.{gpus}" for gpus in each or ()]


def test_every_recipe_is_sampled_on_one_node_of_eight_gpus(tmp_path, monkeypatch):
    gpus = [str(number) for number in range(8)]
    monkeypatch.setattr(local_processes, "visible_devices", lambda: gpus)
    counts = {}
    for recipe in sorted(EXAMPLES.rglob("*.yaml")):
        config = fit_engines(sampling_only(read_config(recipe), 16, tmp_path), gpus)
        assert settings_problems(config) + gpu_problems(config, gpus, trains=False) == [], recipe
        each = [plan.environment["CUDA_VISIBLE_DEVICES"].split(",") for plan in engine_plans(config, trains=False)]
        assert {len(one) for one in each} == {config.engine.devices}
        counts[str(recipe.relative_to(EXAMPLES))] = len(each)
    assert counts["qwen3_30b_a3b/config.yaml"] == counts["papers/dppo_30b_a3b.yaml"] == 4  # of 8 and 16


def test_a_model_that_is_not_there_leaves_no_directory(config, tmp_path):
    with pytest.raises(ModelError, match="nowhere"):
        evaluate.evaluate_model(config, tmp_path / "nowhere", "config.yaml")
    assert not config.run.dir.exists()
