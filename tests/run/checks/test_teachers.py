"""The preflight rejects teachers that cannot score the samples of a run."""

import json
import re

import pytest

from dppo_megatron.config import Config
from dppo_megatron.run.checks import preflight
from tests.run.checks.conftest import changed_model, errors
from tests.support.tokenizers import save_character_model


@pytest.mark.parametrize(
    ("added", "template", "fits"), [(7, "{prompt}", 1), (8, "{prompt}", 0), (7, "{prompt}{answer}", 0)]
)
def test_a_teacher_with_a_longer_prompt_has_room_for_a_whole_response(tree, task, tmp_path, added, template, fits):
    """Of 16 positions, 4 are for the row's prompt, 4 for a response and one for the token that a server samples."""
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    tree["data"] = {"train": str(tmp_path / "train.jsonl"), "max_prompt_tokens": 4}
    tree["objective"] = {"settings": {"distillation": "forward_kl", "distillation_coefficient": 1.0}}
    for path, room in ((None, 16), (changed_model(task, tmp_path / "t", max_position_embeddings=16), 12)):
        teacher = {"path": path, "prompt_template": "1" * added + template}
        tree |= {"engine": {"max_model_len": room}, "distillation": {"topk": 4, "teachers": {"t": teacher}}}
        if fits:
            preflight(Config.model_validate(tree), "c")
        else:
            assert re.search(
                "data.train = .*\n.*line 1: teacher t: a prompt and response of .* engine.max_model", errors(tree)
            )


def test_a_teacher_must_have_the_tokens_of_the_policy_and_every_row_one(tree, task, tmp_path):
    taught = {"distillation": "forward_kl", "distillation_coefficient": 1.0}
    tree["objective"] = {"settings": {"delta": 0.2, **taught}}
    tree["distillation"] = {"topk": 4, "teachers": {"same": {"path": str(task / "random_model")}}}
    assert "forward kl from a teacher" in "\n".join(preflight(Config.model_validate(tree), "config.yaml"))

    del tree["distillation"]["teachers"]
    assert "distillation.teachers = []: objective dppo_binary_tv learns from a teacher; add one" in errors(tree)
    tree["distillation"]["teachers"] = {"same": {"path": str(task / "random_model"), "sources": ["x"]}}
    assert "distillation.teachers: data.train has rows of sources without one; name one for each" in errors(tree)
    other = save_character_model(tmp_path / "other")
    tree["distillation"]["teachers"] = {"other": {"path": str(other)}}
    assert "distillation.teachers.other: " in errors(tree)  # its config.json is no model's
    own = json.loads((task / "random_model" / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(own | {"vocab_size": 128}))
    other_tokens = "has another tokenizer than model.path; use a teacher of the same family"
    assert f"distillation.teachers.other.path = {other}: {other_tokens}" in errors(tree)
    for positions, server in (
        (19, False),
        (20, True),
        (20, False),
        (21, True),
    ):  # 16 + 4, and one that a server samples
        (other / "config.json").write_text(json.dumps(own | {"vocab_size": 128, "max_position_embeddings": positions}))
        tree["distillation"]["teachers"]["other"]["in_trainer"] = not server
        problem = f"{other}: a prompt and response of 16 + 4 tokens, but the model has {positions} positions"
        problem += ", one of them for a token that the server samples; lower" * server
        assert (problem in errors(tree)) == (positions < 20 + server)
    tree["distillation"]["teachers"] = {"small": {"path": str(task / "random_model")}}
    tree["model"]["path"] = changed_model(task, tmp_path / "larger", vocab_size=own["vocab_size"] + 4)
    small = f"distillation.teachers.small.path = {task / 'random_model'}: has 16 tokens"
    assert f"{small}, model.path 20; use a teacher with at least as many" in errors(tree)
    tree["model"]["path"] = str(task / "random_model")
    tree["distillation"]["topk"] = 17
    assert f"{small}; lower distillation.topk (17) to that" in errors(tree)
    tree["distillation"]["topk"] = 4
    tree["objective"] = {}
    assert "uses none; set objective.settings.distillation, or remove it" in errors(tree)
