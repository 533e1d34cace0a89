"""The preflight reports every mistake at once, with setting, value and remedy."""

import contextlib
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from dppo_megatron.checks import data, preflight, user_code
from dppo_megatron.config import Config, ConfigError
from dppo_megatron.convert.job import ConversionWorker, convert
from dppo_megatron.convert.layout import TargetLayout
from dppo_megatron.convert.to_megatron import ToMegatron
from dppo_megatron.data.prompts import PromptFileError, answer_end, training_prompts
from dppo_megatron.data.tokenizer import load_tokenizer
from dppo_megatron.hf import make_random_hf_model
from dppo_megatron.hf.small_model import CHAT_TEMPLATE, chat_tokenizer, write_small_model
from dppo_megatron.trainer.batches import SupervisedBatches
from tests.checks.conftest import changed_model


def found(tree: dict, place: str = "run") -> str:
    with pytest.raises(ConfigError) as raised:
        preflight(Config.model_validate(tree), "config.yaml", place=place)
    return "\n".join(raised.value.violations)


def test_a_good_config_says_what_will_be_trained(tree):
    notes = "\n".join(preflight(Config.model_validate(tree), "config.yaml"))
    assert "dppo_binary_tv" in notes
    assert "7600 prompts" in notes


def test_a_secret_that_cannot_be_read_is_named_before_a_start(tree, tmp_path):
    tree["engine"] |= {"urls": ["http://127.0.0.1:1"], "secret_file": str(tmp_path / "secret")}
    assert found(tree).startswith(f"engine.secret_file = {tmp_path / 'secret'}: not a readable file")
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
        ({"eval": {"every": 2}}, "eval.every = 2: there is nothing to evaluate; set data.eval"),
        (
            {"reward": {"name": "arithmetic", "settings": {"wrong": 1}}},
            "reward.settings: arithmetic does not accept them: .*'wrong'; correct them",
        ),
    ],
)
def test_what_a_run_would_lack_is_refused_before_the_start(tree, monkeypatch, sections, problem):
    for package in ("wandb", "tensorboard", "math_verify"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "dppo_megatron.rewards.mathematics", raising=False)
    monkeypatch.setattr("dppo_megatron.rewards.import_problem", lambda reward: None)  # of a process with packages
    if "eval" in sections:
        del tree["data"]["eval"]
    assert re.search(problem, found(tree | sections), re.MULTILINE)


def test_the_tools_of_an_environment_count_in_the_longest_prompt(tree, task, tmp_path):
    model = shutil.copytree(task / "random_model", tmp_path / "chat")
    calls = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    template = "{{ '1' * 20 if tools else '' }}{% for m in messages %}{{ m.content }}" + calls + "{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    table = "tests.environments.worlds:Table"
    tree |= {"model": {"path": str(model), "dtype": "fp32"}, "environment": {"name": table}}
    tree["data"] |= {"chat_template": True}
    assert "data.max_prompt_tokens" in found(tree)
    tree["data"]["max_prompt_tokens"] = 40
    preflight(Config.model_validate(tree), "config.yaml")
    for wrong, why in (
        (template.replace(calls, ""), "writes a call in an unknown form"),
        (template.partition("}}")[2], "not show tools"),
    ):
        (model / "chat_template.jinja").write_text(wrong)
        assert re.search(f"^environment.name = {table}: has tools, but .*{why}.*; use another model or", found(tree))
        agent = Config.model_validate(tree | {"environment": {"agent": "tests.gateway.agents:talks"}})
        assert why in "".join(note for note in preflight(agent, "c") if note.startswith("warning: environment.agent"))


def test_everything_wrong_is_reported_at_once(tree):
    tree["objective"] = {"name": "absent_package:objective"}
    tree["reward"] = {"name": "arithmetc"}
    tree["parallel"] = {"world_size": 8, "tensor": 8}
    tree["data"]["eval"] = "absent.jsonl"
    problems = found(tree)
    assert "objective.name = absent_package:objective: " in problems
    assert "arithmetic" in problems
    assert "parallel.tensor = 8" in problems
    assert "absent.jsonl" in problems


@pytest.mark.parametrize(
    ("answer", "limit", "problem"),
    [
        (60, 64, "a prompt and response of 4 + 61 tokens, but the model has 64 positions"),
        (40, 40, "a response of 41 tokens, but rollout.max_response_tokens = 40; raise the limit, or remove it"),
        (40, 41, None),
    ],
)
def test_given_answers_fit_the_model_and_the_limit(tree, tmp_path, answer, limit, problem):
    tree["data"] = {"train": str(tmp_path / "train.jsonl")}
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+1=", "answer": "2" * answer}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree |= {"objective": {"name": "nll"}, "engine": {}, "rollout": {"max_response_tokens": limit, "group_size": 1}}
    if problem is None:
        preflight(Config.model_validate(tree), "config.yaml")
    else:
        assert f"line 2: {problem}" in found(tree)
    config = Config.model_validate(tree)
    tokenizer = load_tokenizer(config.model.path)
    batches = SupervisedBatches(config, training_prompts(config, tokenizer), tokenizer, 0, 1)
    with pytest.raises(PromptFileError, match="row 2: a ") if problem else contextlib.nullcontext():
        batches.read(0)


@pytest.mark.parametrize(
    ("template", "tokenizer_end", "model_ends", "end", "problem"),
    [
        (CHAT_TEMPLATE, "<|im_end|>", "<|im_end|>", "<|im_end|>", None),
        (CHAT_TEMPLATE, None, "<|im_end|>", "<|im_end|>", None),
        (CHAT_TEMPLATE, "~", ["~", "<|im_end|>"], "<|im_end|>", None),
        (CHAT_TEMPLATE, "~", "~", None, "its chat template writes '<|im_end|>\\n' after an answer"),
        (CHAT_TEMPLATE.replace("<|im_end|>", ""), "~", "~", None, "after an answer, and generation_config.json"),
        (None, "~", ["~", "<|im_end|>"], "~", None),
        (None, None, "<|im_end|>", "<|im_end|>", None),
        (None, None, ["~", "<|im_end|>"], None, "tokenizer name ['<|im_end|>', '~']; name the right one"),
    ],
)
def test_a_given_answer_ends_as_a_response_does(tree, tmp_path, template, tokenizer_end, model_ends, end, problem):
    model, tokenizer = tmp_path / "model", chat_tokenizer(positions=64)
    write_small_model(model, 0, tokenizer)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": tokenizer_end}))
    (model / "chat_template.jinja").write_text(template or "")
    ids = tokenizer.convert_tokens_to_ids(model_ends)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    tree |= {"model": {"path": str(model)}, "objective": {"name": "nll"}, "engine": {}, "rollout": {"group_size": 1}}
    tree["data"] = {"train": str(tmp_path / "train.jsonl"), "chat_template": template is not None}
    config, tokenizer = Config.model_validate(tree), load_tokenizer(model)
    if problem is None:
        preflight(config, "config.yaml")
        assert tokenizer.convert_ids_to_tokens(answer_end(config, tokenizer)) == end
    else:
        assert problem in found(tree)


def test_pairs_of_mistakes_are_one_line_each_and_do_not_hide_one_another(tree, tmp_path):
    (tmp_path / "questions.jsonl").write_text('{"question": "1", "answer": "1"}\n' * 200)
    model = tree["model"]["path"]
    tree["model"]["path"] = str(tmp_path / "absent")
    tree["data"] = {"train": str(tmp_path / "questions.jsonl"), "eval": "absent.jsonl"}
    tree["parallel"] = {"world_size": 3, "tensor": 2}
    tree["engine"]["max_model_len"] = None
    tree["rollout"]["bank"] = str(tmp_path / "bank")
    found_now = found(tree).splitlines()
    assert [line.partition(" = ")[0].strip() for line in found_now] == [
        "parallel.world_size", "model.path", "rollout.bank", "data.eval", "data.train", "- 200 lines (1-200): no "
        "column 'prompt' (data.prompt_column); it has 'question', 'answer'",
    ]  # fmt: skip
    tree["model"]["path"] = model
    tree["parallel"] = {"world_size": 3, "tensor": 3}
    tree["rollout"]["bank"] = str(tmp_path)
    assert f"rollout.bank = {tmp_path}: not a bank, because it has no head.json" in found(tree)
    del tree["rollout"]["bank"]
    problems = found(tree)
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
    assert problem in found(tree)


def test_fp8_engines_are_refused_on_a_cpu(tree, task, tmp_path, monkeypatch):
    model = shutil.copytree(task / "random_model", tmp_path / "whole_blocks")
    config = json.loads((model / "config.json").read_text())
    make_random_hf_model(tmp_path / "wide", config | {"intermediate_size": 512}, seed=1)
    shutil.copytree(tmp_path / "wide", model, dirs_exist_ok=True)
    tree["model"]["path"] = str(model)
    tree["engine"] |= {"quantization": "fp8_block", "dtype": "bf16"}
    monkeypatch.setattr("dppo_megatron.checks.devices.visible_devices", list)
    assert "engine.quantization = fp8_block: needs a GPU" in found(tree)
    tree["model"]["path"] = str(task / "random_model")
    assert "no multiple of the 128 values of an FP8 block; set engine.quantization to none" in found(tree)
    tree["model"]["path"] = str(model)
    monkeypatch.setattr("dppo_megatron.checks.devices.visible_devices", lambda: ["0", "1"])
    preflight(Config.model_validate(tree), "config.yaml")
    tree["engine"]["quantization"] = "fp8_block_emulated"
    monkeypatch.setattr("dppo_megatron.checks.devices.visible_devices", list)
    preflight(Config.model_validate(tree), "config.yaml")


def test_what_only_a_gpu_computes_is_asked_of_the_node_not_of_where_the_job_is_submitted(tree):
    tree["model"] |= {"dtype": "bf16", "fp8": "blockwise", "layers": "transformer_engine"}
    for place in ("run", "node"):
        problems = found(tree, place)
        for setting in ("model.fp8 = blockwise", "model.layers = transformer_engine"):
            assert f"{setting}: " in problems
    preflight(Config.model_validate(tree), "config.yaml", place="elsewhere")
    tree["slurm"] = {"gpu": "a100-80"}
    assert "model.fp8 = blockwise: needs compute capability 9.0 or newer, the GPU has 8.0" in found(tree, "elsewhere")
    tree |= {"slurm": {}, "model": tree["model"] | {"dtype": "fp32"}, "parallel": {"tensor": 8, "world_size": 8}}
    problems = found(tree, "elsewhere")
    assert "set model.dtype to bf16" in problems
    assert "parallel.tensor = 8" in problems


def test_answers_that_the_reward_cannot_compare_with_are_named_by_line(tree, tmp_path):
    rows = [("1+1=", "2"), ("1+2=", "three"), ("1+3=", 4.5)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in rows))
    tree["data"]["more"] = [{"path": str(tmp_path / "sums.jsonl")}, {"path": "absent.jsonl"}]
    problems = found(tree)
    first = "line 2: reward arithmetic: the answer 'three' is not an integer"
    assert f"sums.jsonl: 2 malformed lines\n  - {first}\n  - line 3: " in problems
    assert f"data.more.1.path = absent.jsonl: no file {Path('absent.jsonl').absolute()}; " in problems
    tree["data"]["more"] = []
    tree["reward"] = {"terms": [{"name": "arithmetic", "sources": ["sums"]}]}
    assert "no term of reward.terms is for the data source ''" in found(tree)


def test_a_held_out_set_of_training_rows_is_refused(tree, task, tmp_path):
    rows = [json.loads(line) | {"id": 1} for line in (task / "train.jsonl").read_text().splitlines()[:4]]
    copied, linked = tmp_path / "copied.jsonl", tmp_path / "linked.jsonl"
    copied.write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    linked.symlink_to(task / "train.jsonl")
    sets = {"again": {"path": str(copied), "prompt_template": "Q: {prompt}"}, "linked": {"path": str(linked)}}
    problems = found(tree | {"eval": {"sets": sets}}).splitlines()
    assert f"eval.sets.again.path = {copied}: the run trains on all of its rows; name rows that it does not" in problems
    assert f"eval.sets.linked.path = {linked}: the run trains on this file, so nothing is held out" in problems[0]
    copied.write_text(copied.read_text() + json.dumps({"prompt": "1+1=", "answer": "3"}) + "\n")
    preflight(Config.model_validate(tree | {"eval": {"sets": {"again": sets["again"]}}}), "config.yaml")


def test_a_model_without_a_tokenizer_is_one_violation(tree, task, tmp_path):
    (tmp_path / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(task / "random_model" / name, tmp_path / "bare")
    tree["model"]["path"] = str(tmp_path / "bare")
    assert found(tree).count("\n") == 0
    assert "has no tokenizer" in found(tree)


def test_start_weights_that_are_not_there_or_of_another_model_are_named(tree, task, tmp_path):
    tree["model"]["weights"] = str(tmp_path / "absent")
    assert f"model.weights = {tmp_path / 'absent'}: no such directory" in found(tree)
    checkpoint = tmp_path / "checkpoint"
    convert(lambda: ToMegatron(task / "random_model", checkpoint, TargetLayout(tensor=2)), worker=ConversionWorker())
    tree["model"]["weights"] = str(checkpoint)
    preflight(Config.model_validate(tree), "config.yaml")
    tree["model"]["path"] = changed_model(task, tmp_path / "other", rms_norm_eps=0.5)
    assert "rms_norm_eps = 1e-06 in the checkpoint, 0.5 in" in found(tree)
    tree["model"] = {"path": changed_model(task, tmp_path / "deeper", num_hidden_layers=9), "dtype": "fp32"}
    assert "deeper: its weights do not fit config.json; model.layers." in found(tree)


@pytest.mark.parametrize(
    ("settings", "problems"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", "Qwen3ForCausalLM"]),
        ({"vocab_size": 12}, ["tokenizer has 16 tokens but the model only 12"]),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(tree, task, tmp_path, settings, problems):
    tree["model"]["path"] = changed_model(task, tmp_path / "other", **settings)
    text = found(tree)
    assert all(problem in text for problem in problems)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("prompts.jsonl", "empty"),
        ("prompts.csv", "only JSONL and parquet are read: pyarrow.parquet.write_table(pyarrow.csv.read_csv(IN), OUT)"),
        ("absent/dataset", "; one of the Hub: `hf download NAME --repo-type dataset --local-dir DIR`"),
    ],
)
def test_what_is_no_prompt_file_is_refused(tree, tmp_path, name, problem):
    tree["data"]["train"] = str(tmp_path / name)
    if "absent" not in name:
        (tmp_path / name).touch()
    assert problem in found(tree)


def test_a_command_in_another_directory_is_answered_with_where_to_start_it(tree, tmp_path, monkeypatch):
    (tmp_path / "first/model").mkdir(parents=True)
    (tmp_path / "first/reward.py").touch()
    monkeypatch.chdir(tmp_path / "first")
    tree |= {"model": {"path": "first/model"}, "reward": {"name": "first.reward:reward"}}
    assert found(tree).splitlines()[-1] == (
        f"working directory = {tmp_path}/first: relative paths begin there; "
        f"first/model, first/reward.py: in {tmp_path}; start the command there"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert f": relative paths begin there; first/model: in {tmp_path}; " in found(tree)  # its reward can be imported
    monkeypatch.chdir(tmp_path)
    assert "working directory" not in found(tree)


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
    sampled = found(tree | {"objective": {"name": "pg_is", "settings": {"supervised": True, "importance": "none"}}})
    assert "objective.settings.supervised = true: objective.name = pg_is learns from sampled rollouts" in sampled
    given = found(tree | {"objective": {"name": "nll", "settings": {"supervised": False}}})
    assert "objective.settings.supervised = false: objective.name = nll learns from given answers" in given
    preflight(Config.model_validate(tree | {"objective": {"name": "nll"}}), "config.yaml")


def test_an_objective_that_cannot_describe_itself_is_named(tree, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "speechless.py").write_text(
        "from dppo_megatron.objectives import Objective, ObjectiveSettings\n"
        "class Speechless(Objective):\n    def describe(self):\n        return self.words\n"
        "mine = Speechless('mine', ObjectiveSettings(delta=0.1))\n"
    )
    assert "objective.name = speechless:mine: describe() failed: AttributeError" in found(
        tree | {"objective": {"name": "speechless:mine"}}
    )
