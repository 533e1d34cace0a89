"""The preflight reports every mistake at once, with setting, value and remedy."""

import json
import re
import shutil
import sys

import pytest

from dppo_megatron.config import Config
from dppo_megatron.convert.job import ConversionWorker, convert
from dppo_megatron.convert.layout import TargetLayout
from dppo_megatron.convert.to_megatron import ToMegatron
from dppo_megatron.hf import make_random_hf_model
from dppo_megatron.run.checks import data, preflight, user_code
from tests.run.checks.conftest import changed_model, errors


def test_the_notes_on_a_good_config_name_the_objective_and_the_prompts(tree):
    notes = "\n".join(preflight(Config.model_validate(tree), "config.yaml"))
    assert "dppo_binary_tv" in notes
    assert "7600 prompts" in notes


def test_a_secret_that_cannot_be_read_is_named_before_a_start(tree, tmp_path):
    tree["engine"] |= {"urls": ["http://127.0.0.1:1"], "secret_file": str(tmp_path / "secret")}
    assert errors(tree).startswith(f"engine.secret_file = {tmp_path / 'secret'}: not a readable file")
    (tmp_path / "secret").write_text("x")
    preflight(Config.model_validate(tree), "config.yaml")


def test_a_server_that_refuses_the_connection_is_noted_before_the_start(tree):
    tree["engine"]["urls"] = ["http://127.0.0.1:1"]
    (note,) = [line for line in preflight(Config.model_validate(tree), "c") if line.startswith("engine.urls")]
    assert "http://127.0.0.1:1: [Errno 111] Connection refused; a run waits 900 s for it" in note


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"tracking": {"wandb": "offline"}}, "tracking.wandb = offline: .* pip install wandb, or set it to off"),
        ({"tracking": {"tensorboard": True}}, "tracking.tensorboard = true: .* pip install tensorboard, or set it"),
        ({"reward": {"name": "math"}}, "reward.name = math: .*math_verify.* pip install math-verify$"),
        (
            {"eval": {"every": 2}},
            "eval.every = 2: neither data.eval nor eval.sets names a file, so it has no effect; remove it",
        ),
        (
            {"reward": {"name": "arithmetic", "settings": {"wrong": 1}}},
            "reward.settings: arithmetic does not accept them: .*'wrong'; correct them",
        ),
    ],
)
def test_a_missing_package_or_wrong_setting_is_refused_before_the_start(tree, monkeypatch, sections, problem):
    for package in ("wandb", "tensorboard", "math_verify"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "dppo_megatron.rollout.rewards.mathematics", raising=False)
    monkeypatch.setattr(
        "dppo_megatron.rollout.rewards.import_problem", lambda reward: None
    )  # of a process with packages
    if "eval" in sections:
        del tree["data"]["eval"]
    assert re.search(problem, errors(tree | sections), re.MULTILINE)


def test_everything_wrong_is_reported_at_once(tree):
    tree["objective"] = {"name": "absent_package:objective"}
    tree["reward"] = {"name": "arithmetc"}
    tree["parallel"] = {"world_size": 8, "tensor": 8}
    tree["data"]["eval"] = "absent.jsonl"
    problems = errors(tree)
    assert "objective.name = absent_package:objective: " in problems
    assert "arithmetic" in problems
    assert "parallel.tensor = 8" in problems
    assert "absent.jsonl" in problems


def test_pairs_of_mistakes_are_one_line_each_and_do_not_hide_one_another(tree, tmp_path):
    (tmp_path / "questions.jsonl").write_text('{"question": "1", "answer": "1"}\n' * 200)
    model = tree["model"]["path"]
    tree["model"]["path"] = str(tmp_path / "absent")
    tree["data"] = {"train": str(tmp_path / "questions.jsonl"), "eval": "absent.jsonl"}
    tree["parallel"] = {"world_size": 3, "tensor": 2}
    tree["engine"]["max_model_len"] = None
    tree["rollout"]["bank"] = str(tmp_path / "bank")
    found_now = errors(tree).splitlines()
    assert [line.partition(" = ")[0].strip() for line in found_now] == [
        "parallel.world_size", "model.path", "rollout.bank", "data.eval", "data.train", "- 200 lines (1-200): no "
        "column 'prompt' (data.prompt_column); it has 'question', 'answer'",
    ]  # fmt: skip
    tree["model"]["path"] = model
    tree["parallel"] = {"world_size": 3, "tensor": 3}
    tree["rollout"]["bank"] = str(tmp_path)
    assert f"rollout.bank = {tmp_path}: not a bank, because it has no head.json" in errors(tree)
    del tree["rollout"]["bank"]
    problems = errors(tree)
    assert (
        "parallel.tensor = 3: does not divide 4 attention heads, 448 columns of intermediate_size, 2 key-value"
        in problems
    )
    assert problems.count("use one of") == 1
    assert "data.max_prompt_tokens = 1024 + rollout.max_response_tokens = 4: the model supports 64" in problems


@pytest.mark.parametrize(
    ("section", "changes", "problem"),
    [
        ("objective", {"name": "dppo_topk_tv"}, "rollout.topk_logprobs = 0: objective dppo_topk_tv compares"),
        ("engine", {"max_model_len": 65}, "engine.max_model_len = 65: the model supports 64 positions"),
        ("engine", {"tensor_parallel": 3}, "engine.tensor_parallel = 3: does not divide"),
        ("rollout", {"stop_token_ids": [3, 16]}, "rollout.stop_token_ids = 16: the model has the tokens 0 to 15"),
        ("rollout", {"topk_logprobs": 17}, "rollout.topk_logprobs = 17: the model has 16 tokens"),
        ("reward", {"name": "absent_module:reward"}, "Add its directory to PYTHONPATH, start in the directory"),
    ],
)
def test_settings_that_the_model_or_the_code_contradicts_are_refused(tree, section, changes, problem):
    tree[section] = tree.get(section, {}) | changes
    assert problem in errors(tree)


def test_fp8_engines_are_refused_on_a_cpu(tree, task, tmp_path, monkeypatch):
    model = shutil.copytree(task / "random_model", tmp_path / "whole_blocks")
    config = json.loads((model / "config.json").read_text())
    make_random_hf_model(tmp_path / "wide", config | {"intermediate_size": 512}, seed=1)
    shutil.copytree(tmp_path / "wide", model, dirs_exist_ok=True)
    tree["model"]["path"] = str(model)
    tree["engine"] |= {"quantization": "fp8_block", "dtype": "bf16"}
    monkeypatch.setattr("dppo_megatron.run.checks.devices.visible_devices", list)
    assert "engine.quantization = fp8_block: needs a GPU" in errors(tree)
    tree["model"]["path"] = str(task / "random_model")
    assert "no multiple of the 128 values of an FP8 block; set engine.quantization to none" in errors(tree)
    tree["model"]["path"] = str(model)
    monkeypatch.setattr("dppo_megatron.run.checks.devices.visible_devices", lambda: ["0", "1"])
    preflight(Config.model_validate(tree), "config.yaml")
    tree["engine"]["quantization"] = "fp8_block_emulated"
    monkeypatch.setattr("dppo_megatron.run.checks.devices.visible_devices", list)
    preflight(Config.model_validate(tree), "config.yaml")


def test_gpu_features_are_checked_on_the_node_or_against_slurm_gpu(tree):
    tree["model"] |= {"dtype": "bf16", "fp8": "blockwise", "layers": "transformer_engine"}
    for place in ("run", "node"):
        problems = errors(tree, place)
        for setting in ("model.fp8 = blockwise", "model.layers = transformer_engine"):
            assert f"{setting}: " in problems
    preflight(Config.model_validate(tree), "config.yaml", place="elsewhere")
    tree["slurm"] = {"gpu": "a100-80"}
    assert "model.fp8 = blockwise: needs compute capability 9.0 or newer, the GPU has 8.0" in errors(tree, "elsewhere")
    tree |= {"slurm": {}, "model": tree["model"] | {"dtype": "fp32"}, "parallel": {"tensor": 8, "world_size": 8}}
    problems = errors(tree, "elsewhere")
    assert "set model.dtype to bf16" in problems
    assert "parallel.tensor = 8" in problems


def test_a_model_without_a_tokenizer_is_one_violation(tree, task, tmp_path):
    (tmp_path / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(task / "random_model" / name, tmp_path / "bare")
    tree["model"]["path"] = str(tmp_path / "bare")
    assert errors(tree).count("\n") == 0
    assert "has no tokenizer" in errors(tree)


def test_start_weights_that_are_not_there_or_of_another_model_are_named(tree, task, tmp_path):
    tree["model"]["weights"] = str(tmp_path / "absent")
    assert f"model.weights = {tmp_path / 'absent'}: no such directory" in errors(tree)
    checkpoint = tmp_path / "checkpoint"
    convert(lambda: ToMegatron(task / "random_model", checkpoint, TargetLayout(tensor=2)), worker=ConversionWorker())
    tree["model"]["weights"] = str(checkpoint)
    preflight(Config.model_validate(tree), "config.yaml")
    tree["model"]["path"] = changed_model(task, tmp_path / "other", rms_norm_eps=0.5)
    assert "rms_norm_eps = 1e-06 in the checkpoint, 0.5 in" in errors(tree)
    tree["model"] = {"path": changed_model(task, tmp_path / "deeper", num_hidden_layers=9), "dtype": "fp32"}
    assert "deeper: its weights do not fit config.json; model.layers." in errors(tree)


@pytest.mark.parametrize(
    ("settings", "problems"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", "Qwen3ForCausalLM"]),
        ({"vocab_size": 12}, ["tokenizer has 16 tokens but the model only 12"]),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(tree, task, tmp_path, settings, problems):
    tree["model"]["path"] = changed_model(task, tmp_path / "other", **settings)
    text = errors(tree)
    assert all(problem in text for problem in problems)


def test_a_command_in_another_directory_is_answered_with_where_to_start_it(tree, tmp_path, monkeypatch):
    (tmp_path / "first/model").mkdir(parents=True)
    (tmp_path / "first/reward.py").touch()
    monkeypatch.chdir(tmp_path / "first")
    tree |= {"model": {"path": "first/model"}, "reward": {"name": "first.reward:reward"}}
    assert errors(tree).splitlines()[-1] == (
        f"working directory = {tmp_path}/first: relative paths begin there; "
        f"first/model, first/reward.py: in {tmp_path}; start the command there"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert f": relative paths begin there; first/model: in {tmp_path}; " in errors(tree)  # its reward can be imported
    monkeypatch.chdir(tmp_path)
    assert "working directory" not in errors(tree)


LINE = "Correct that line; its imports must be installed or on PYTHONPATH"
UNFIT = "a reward takes (prompt, response_text) and returns a number"


@pytest.mark.parametrize(
    ("body", "problem", "note"),
    [
        ("x = (1", f"SyntaxError: .* ({{file}}, line 1). {LINE}", None),
        ("import json\nimport numpyy", f"ModuleNotFoundError: .*'numpyy' ({{file}}, line 2). {LINE}", None),
        ("import json\n\njson.loads('')", f"JSONDecodeError: .* ({{file}}, line 3). {LINE}", None),
        ("def reward(prompt, text): return 'good'", f"TypeError: it returned str, expected a number; {UNFIT}", None),
        ("def reward(prompt, text): pass", f"TypeError: it returned NoneType, .*; {UNFIT}", None),
        ("def reward(prompt, text): return [1]", f"TypeError: .*'list'; {UNFIT}", None),
        ("def reward(one): return 1", f"reward() takes 1 positional argument but 2 were given; {UNFIT}", None),
        ("def reward(completion, gold): return 1", "the prompt would be passed as parameter completion; name .*", None),
        ("def reward(prompts, completions, gold): return [1]", f"the row has no column gold, .*; {UNFIT}", None),
        ("def reward(prompt, text): return prompt.columns['gold']", None, "KeyError: 'gold' ({file}, line 1)"),
        ("def reward(prompt, text):\n len(3)", None, "TypeError: object of type .* ({file}, line 2)"),
        ("import os\ndef reward(prompt, text): os._exit(3)", None, "the verifier's process ended (exit code 3)"),
        ("def reward(prompt, text): return float(prompt.answer) + len(text)", None, None),
    ],
)
def test_a_reward_that_scores_nothing_is_refused_and_one_that_raises_is_noted(
    task, tmp_path, monkeypatch, body, problem, note
):
    name = f"mine_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(body + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = Config(
        run={"dir": tmp_path / "run"},
        model={"path": task / "random_model"},
        data={"train": task / "train.jsonl", "eval": task / "heldout.jsonl"},
        reward={"name": f"{name}:reward"},
        train={"steps": 1},
    )
    notes = []
    problems = data.problems(config, None, notes, []) + user_code.reward_problems(config)
    for found, wanted in ((problems, problem), (notes[2:], note)):
        assert len(found) == (wanted is not None), found
        pattern = (
            re.escape(wanted or "").replace(re.escape(".*"), ".*").replace(r"\{file\}", str(tmp_path / f"{name}.py"))
        )
        assert re.search(rf"reward\.name = {name}:reward: .*{pattern}$", found[0]) if found else not wanted


def test_a_supervised_objective_under_another_name_is_refused_and_the_reverse(tree):
    sampled = errors(tree | {"objective": {"name": "pg_is", "settings": {"supervised": True, "importance": "none"}}})
    assert "objective.settings.supervised = true: objective.name = pg_is learns from sampled rollouts" in sampled
    given = errors(tree | {"objective": {"name": "nll", "settings": {"supervised": False}}})
    assert "objective.settings.supervised = false: objective.name = nll learns from given answers" in given
    preflight(Config.model_validate(tree | {"objective": {"name": "nll"}}), "config.yaml")


def test_an_objective_that_cannot_describe_itself_is_named(tree, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "speechless.py").write_text(
        "from dppo_megatron.objectives import Objective, ObjectiveSettings\n"
        "class Speechless(Objective):\n    def describe(self):\n        return self.words\n"
        "mine = Speechless('mine', ObjectiveSettings(delta=0.1))\n"
    )
    assert "objective.name = speechless:mine: describe() failed: AttributeError" in errors(
        tree | {"objective": {"name": "speechless:mine"}}
    )
