"""Rules about prompts, answers, banks and their tokenizer."""

import contextlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE

from dppo_megatron.bank import BankWriter
from dppo_megatron.config import Config
from dppo_megatron.data.prompts import PromptFileError, answer_end, training_prompts
from dppo_megatron.data.tokenizer import load_tokenizer
from dppo_megatron.data.tokenizer_file import TokenizerFile
from dppo_megatron.hf import read_hf_config
from dppo_megatron.hf.small_model import CHAT_TEMPLATE, chat_tokenizer, write_small_model
from dppo_megatron.run.checks import data, preflight
from dppo_megatron.train.trainer.batches import SupervisedBatches
from tests.report.doctor.runs import group
from tests.run.checks.conftest import changed_model, errors


def test_a_bank_of_another_tokenizer_is_named(tree, tmp_path):
    tree["rollout"]["bank"] = str(tmp_path / "bank")
    sampled = group(Path(tree["model"]["path"]), 0, 1)
    stored = replace(sampled, rollouts=tuple(replace(r, token_ids=r.token_ids % 16) for r in sampled.rollouts))
    moved = replace(stored, prompt=replace(stored.prompt, token_ids=stored.prompt.token_ids + 1))
    (tmp_path / "bank").mkdir()
    preflight(Config.model_validate(tree), "config.yaml")  # filled later
    with BankWriter(tmp_path / "bank", 1) as writer:
        writer.append(moved)
    bank = f"rollout.bank = {tmp_path / 'bank'}"
    assert f"{bank}: prompt 0: model.path's tokenizer encodes its text as other token ids; name the model" in errors(
        tree
    )
    shutil.rmtree(tmp_path / "bank")
    with BankWriter(tmp_path / "bank", 1) as writer:
        writer.append(sampled)
    assert f"{bank}: prompt 0: model.path's tokenizer has 16 tokens, and token " in errors(tree)
    shutil.rmtree(tmp_path / "bank")
    with BankWriter(tmp_path / "bank", 1) as writer:
        writer.append(stored)
    preflight(Config.model_validate(tree), "config.yaml")
    (path,) = (tmp_path / "bank").glob("*.jsonl")
    path.write_bytes(b"{}\n")
    assert errors(tree).startswith(bank)


@pytest.mark.parametrize(("truncated", "named"), [(False, True), (True, False)])
def test_only_a_truncated_prompt_may_have_other_tokens_of_the_same_text(tree, truncated, named):
    tokenizer = Tokenizer(BPE({"1": 0, "+": 1, "1+": 2}, [("1", "+")]))
    tokenizer.decoder = Fuse()
    sampled = group(Path(tree["model"]["path"]), 0, 1)
    prompt = replace(sampled.prompt, text="1+", token_ids=np.array([0, 1], np.int32))
    rollouts = tuple(replace(r, token_ids=r.token_ids % 3) for r in sampled.rollouts)
    stored = replace(sampled, prompt=prompt, rollouts=rollouts)
    assert bool(TokenizerFile(tokenizer).mismatch(stored, truncated=truncated)) == named


def test_a_model_with_far_more_rows_than_tokens_is_noted(tree, task, tmp_path):
    size = len(load_tokenizer(tree["model"]["path"]))
    tree["model"]["path"] = changed_model(task, tmp_path / "model", vocab_size=2 * size)
    notes = []
    config = Config.model_validate(tree)
    data.problems(config, read_hf_config(config.model.path), notes, [])
    assert f"the tokenizer has {size} tokens and the model {2 * size} rows; check that they belong" in notes[0]


def test_the_tools_of_an_environment_count_in_the_longest_prompt(tree, task, tmp_path):
    model = shutil.copytree(task / "random_model", tmp_path / "chat")
    calls = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    template = "{{ '1' * 20 if tools else '' }}{% for m in messages %}{{ m.content }}" + calls + "{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    table = "tests.rollout.environments.worlds:Table"
    tree |= {"model": {"path": str(model), "dtype": "fp32"}, "environment": {"name": table}}
    tree["data"] |= {"chat_template": True}
    assert "data.max_prompt_tokens" in errors(tree)
    tree["data"]["max_prompt_tokens"] = 40
    preflight(Config.model_validate(tree), "config.yaml")
    for wrong, why in (
        (template.replace(calls, ""), "writes a call in an unknown form"),
        (template.partition("}}")[2], "not show tools"),
    ):
        (model / "chat_template.jinja").write_text(wrong)
        assert re.search(f"^environment.name = {table}: has tools, but .*{why}.*; use another model or", errors(tree))
        agent = Config.model_validate(tree | {"environment": {"agent": "tests.rollout.gateway.agents:talks"}})
        assert why in "".join(note for note in preflight(agent, "c") if note.startswith("warning: environment.agent"))


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
        assert f"line 2: {problem}" in errors(tree)
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
        assert problem in errors(tree)


def test_answers_that_the_reward_cannot_compare_with_are_named_by_line(tree, tmp_path):
    rows = [("1+1=", "2"), ("1+2=", "three"), ("1+3=", 4.5)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in rows))
    tree["data"]["more"] = [{"path": str(tmp_path / "sums.jsonl")}, {"path": "absent.jsonl"}]
    problems = errors(tree)
    first = "line 2: reward arithmetic: the answer 'three' is not an integer"
    assert f"sums.jsonl: 2 malformed lines\n  - {first}\n  - line 3: " in problems
    assert f"data.more.1.path = absent.jsonl: no file {Path('absent.jsonl').absolute()}; " in problems
    tree["data"]["more"] = []
    tree["reward"] = {"terms": [{"name": "arithmetic", "sources": ["sums"]}]}
    assert "no term of reward.terms is for the data source ''" in errors(tree)


def test_a_held_out_set_of_training_rows_is_refused(tree, task, tmp_path):
    rows = [json.loads(line) | {"id": 1} for line in (task / "train.jsonl").read_text().splitlines()[:4]]
    copied, linked = tmp_path / "copied.jsonl", tmp_path / "linked.jsonl"
    copied.write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    linked.symlink_to(task / "train.jsonl")
    sets = {"again": {"path": str(copied), "prompt_template": "Q: {prompt}"}, "linked": {"path": str(linked)}}
    problems = errors(tree | {"eval": {"sets": sets}}).splitlines()
    assert f"eval.sets.again.path = {copied}: the run trains on all of its rows; name rows that it does not" in problems
    assert f"eval.sets.linked.path = {linked}: the run trains on this file, so nothing is held out" in problems[0]
    copied.write_text(copied.read_text() + json.dumps({"prompt": "1+1=", "answer": "3"}) + "\n")
    preflight(Config.model_validate(tree | {"eval": {"sets": {"again": sets["again"]}}}), "config.yaml")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("prompts.jsonl", "empty"),
        ("prompts.csv", "only JSONL and parquet are read: pyarrow.parquet.write_table(pyarrow.csv.read_csv(IN), OUT)"),
        ("absent/dataset", "; one of the Hub: `hf download NAME --repo-type dataset --local-dir DIR`"),
    ],
)
def test_a_path_that_is_no_prompt_file_is_refused(tree, tmp_path, name, problem):
    tree["data"]["train"] = str(tmp_path / name)
    if "absent" not in name:
        (tmp_path / name).touch()
    assert problem in errors(tree)
