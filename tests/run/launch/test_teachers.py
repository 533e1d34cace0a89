"""A teacher that the run serves is an engine of a run directory of its own, on the last GPUs."""

import json

import pytest

from dppo_megatron.rollout.engines.kinds import kind_of
from dppo_megatron.rollout.engines.secret import read_secret
from dppo_megatron.run.checks import load_config
from dppo_megatron.run.checks.devices import devices_needed, gpu_problems
from dppo_megatron.run.launch import local_processes
from tests.support.actor_cases import QWEN3
from tests.support.configs import make_config


@pytest.fixture
def config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | {"max_position_embeddings": 2048}))
    teachers = {
        "large": {"path": str(tmp_path), "tensor_parallel": 2, "sources": ["x"]},
        "own": {"path": str(tmp_path), "prompt_template": "{prompt}{answer}"},
        "away": {"urls": ["http://10.0.0.7:8000"], "sources": ["y"]},
    }
    return make_config(
        run={"dir": str(tmp_path / "run")},
        parallel={"world_size": 2},
        engine={"count": 2, "max_logprobs": 64, "max_model_len": 1100},
        data={"max_prompt_tokens": 1000},
        rollout={"max_response_tokens": 100, "topk_logprobs": 50},
        distillation={"topk": 7, "teachers": teachers},
    )


def test_the_servers_of_teachers_start_as_engines_do(config, monkeypatch, tmp_path):
    monkeypatch.setattr(local_processes, "visible_devices", lambda: [str(i) for i in range(9)])
    plan = local_processes.local_plan(config, resume=False)
    assert devices_needed(config) == 7
    devices = {each.name: each.environment.get("CUDA_VISIBLE_DEVICES") for each in plan.engines}
    assert devices == {"engine-0": "2", "engine-1": "3", "teacher-large": "4,5", "teacher-own": "6"}
    assert not gpu_problems(config, list("0123456"))
    assert "needs 7 GPUs" in gpu_problems(config, list("012345"))[0]
    secrets = {read_secret(config)}
    for each in plan.engines[2:]:
        command, path = each.arguments
        own = load_config(path)  # the command checks it
        assert command == "engine"
        assert own.run.dir == tmp_path / "run" / "teachers" / each.name.removeprefix("teacher-")
        assert not own.distillation.teachers
        argv = " ".join(kind_of(own).command(own, 1, own.model.path, 0))
        assert "--max-logprobs 7" in argv
        assert f"--max-model-len {2048 if each.name == 'teacher-own' else 1101}" in argv
        secrets.add(read_secret(own))
    assert len(secrets) == 3
