"""A bank that is filled without a trainer, and prompts that are kept by the pass rate measured in it."""

import json
from dataclasses import replace

import numpy as np
import pytest

from dppo_megatron.bank import BankWriter
from dppo_megatron.config import save_resolved
from dppo_megatron.rollout.orchestrator.pass_rates import PassRateError, keep, measure
from dppo_megatron.run.checks import settings_problems
from dppo_megatron.run.launch.sample import sampling_only
from tests.support.bank import make_group
from tests.support.configs import make_config
from tests.support.fakes.orchestrator import World, sampling_config
from tests.support.tokenizers import save_character_model

# Whether each of the four answers to a row is right; None: the verifier failed.
ANSWERS = {0: [0, 0, 0, 0], 1: [1, 0, 0, 0], 2: [1, 1, None, 0], 3: [1, 1, 1, 1], 4: [None] * 4, 5: [1, 1, 1, 0]}


@pytest.fixture
def sampling(tmp_path):
    """A config without a trainer."""
    plain = sampling_config(tmp_path / "run", dynamic_sampling=True)
    config = sampling_only(plain, 3, tmp_path / "samples")
    assert settings_problems(config) == []
    return config


def world_of(config, prompts=10):
    return World(config, prompts_in_all=prompts)


def test_one_policy_answers_every_prompt_once_also_if_the_bank_was_half_filled(sampling, tmp_path):
    undisturbed = world_of(sampling_only(sampling, 3, tmp_path / "undisturbed"))
    engine = undisturbed.engine()
    undisturbed.run_attempt(engine)
    assert sorted(group.prompt.position for group in undisturbed.groups()) == list(range(10))  # no multiple of 4
    assert {request.n for request in engine.requests} == {3}
    assert undisturbed.dropped() == []
    steps = [record for record in undisturbed.records() if "time/step_s" in record]
    assert [record["rollout/reward_mean"] for record in steps] == [1.0, 1.0]
    w = world_of(sampling)
    w.run_attempt(w.engine(), until_groups=5)
    again = w.engine()
    w.run_attempt(again)
    assert len(again.requests) <= 5

    def tokens(of):
        return {g.prompt.position: [r.token_ids.tolist() for r in g.rollouts] for g in of.groups()}

    assert tokens(w) == tokens(undisturbed)


@pytest.fixture
def measured(tmp_path):
    """The bank of ANSWERS over a file of seven rows, of which one was not sampled."""
    rows = [{"question": f"q{i}", "answer": str(i), "level": i} for i in range(7)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = make_config(
        run={"dir": tmp_path / "samples"},
        model={"path": save_character_model(tmp_path / "model")},
        data={"train": tmp_path / "train.jsonl", "prompt_column": "question", "prompt_template": "Q: {prompt}"},
    )
    with BankWriter(tmp_path / "samples/bank", 4) as bank:
        for row, answers in ANSWERS.items():
            group = make_group(row)
            prompt = replace(group.prompt, row=row, text=f"Q: q{row}", answer=str(row))
            failed = np.array([answer is None for answer in answers])
            rewards = np.array([2 * (answer or 0) - 1 for answer in answers], np.float32) * ~failed  # 1 and -1
            bank.append(replace(group, prompt=prompt, rewards=rewards, reward_failed=failed))
    save_resolved(config, tmp_path / "samples/config.yaml")
    return tmp_path / "samples/bank"


@pytest.mark.parametrize(
    ("data", "environment", "text"),
    [
        ({"chat_template": True}, {"name": "tests.rollout.environments.worlds:Table"}, "[look_up][double]<user>What?"),
        ({"max_prompt_tokens": 3, "overlong": "truncate"}, {}, "at?"),
        ({"max_prompt_tokens": 5, "overlong": "drop"}, {}, "What?"),
    ],
)
def test_rows_are_read_as_they_were_when_sampled(tmp_path, data, environment, text):
    """Prompts have the environment's tools before a chat, or are cut or dropped."""
    train = tmp_path / "train.jsonl"
    train.write_text('{"prompt": "What?", "answer": "1"}\n{"prompt": "And, longer, what?", "answer": "1"}\n')
    tools = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}" + "<user>{{ messages[0].content }}"
    config = make_config(
        run={"dir": tmp_path / "samples"},
        model={"path": save_character_model(tmp_path / "model", chat_template=tools)},
        data={"train": train, **data},
        environment=environment,
    )
    with BankWriter(tmp_path / "samples/bank", 4) as bank:
        group = make_group(0)
        bank.append(replace(group, prompt=replace(group.prompt, row=0, text=text, answer="1")))
    save_resolved(config, tmp_path / "samples/config.yaml")
    shown = keep(tmp_path / "samples/bank", tmp_path / "out.jsonl", 0, 1)
    assert shown.endswith("1 of 2 prompts\n  left out: 1 not sampled")


def kept(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_prompts_are_kept_by_their_pass_rate_and_the_others_counted(measured, tmp_path):
    shown = keep(measured, tmp_path / "out.jsonl", 0.25, 0.75)
    assert kept(tmp_path / "out.jsonl") == [
        {"question": "q1", "answer": "1", "level": 1, "pass_rate": 0.25, "pass_answers": 4},
        {"question": "q2", "answer": "2", "level": 2, "pass_rate": pytest.approx(2 / 3), "pass_answers": 3},
        {"question": "q5", "answer": "5", "level": 5, "pass_rate": 0.75, "pass_answers": 4},
    ]
    assert shown.splitlines() == [
        f"{tmp_path / 'out.jsonl'}: 3 of 7 prompts",
        "  left out: 1 with a pass rate below 0.25",
        "  left out: 1 with a pass rate above 0.75",
        "  left out: 1 without a graded answer",
        "  left out: 1 not sampled",
    ]
    assert (
        measure(measured)
        == "6 prompts, 19 graded answers, 52.6% right (reward of at least 1); 1 prompts always solved, 1 never"
    )


def test_keep_refuses_bounds_or_prompts_that_do_not_fit_the_bank(measured, tmp_path):
    out = tmp_path / "out.jsonl"
    with pytest.raises(PassRateError, match=r"--pass-rate 0.8:0.2: must be FROM:TO"):
        keep(measured, out, 0.8, 0.2)
    with pytest.raises(PassRateError, match=r"no prompt is left\n.*4 with a pass rate below 0.9"):
        keep(measured, out, 0.9, 0.95)
    train = tmp_path / "train.jsonl"
    lines = train.read_text().splitlines(keepends=True)
    train.write_text("".join(reversed(lines)))
    with pytest.raises(PassRateError, match=r"row 1 is not the prompt that was sampled"):
        keep(measured, out, 0, 1)
    train.write_text("".join(lines[:4]))
    with pytest.raises(PassRateError, match=r"has no row 5, which the bank has"):
        keep(measured, out, 0, 1)
    assert not out.exists()
    (measured.parent / "config.yaml").unlink()
    with pytest.raises(PassRateError, match=r"config.yaml is missing; name RUN/bank"):
        keep(measured, out, 0, 1)
