"""Several rewards, functions of other trainers, answers checked before a run, and a judge over HTTP."""

import asyncio
import json
import sys
import time
import types
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from dppo_megatron.config.schema import RewardConfig
from dppo_megatron.rollout.environments.interface import EnvironmentNameError
from dppo_megatron.rollout.rewards import RewardError, RewardPool, build_rewards
from dppo_megatron.rollout.rewards.conventions import adapt
from dppo_megatron.rollout.rewards.dapo import normal_form
from dppo_megatron.rollout.rewards.outcome import UNFIT, attempt
from dppo_megatron.rollout.rewards.registry import load_attribute, load_reward

FOREIGN = "tests.rollout.rewards.foreign_rewards"


def score(config: dict, prompt, *texts, timeout_s=10.0):
    with RewardPool(RewardConfig(workers=1, timeout_s=timeout_s, **config)) as pool:
        rewards, failed = asyncio.run(pool.score(prompt, texts))
        return rewards.tolist(), failed.tolist(), pool.take_metrics()


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("Answer: 34", 1), ("so\nAnswer: $34$", 1), ("answer :34.0", 0), ("Answer: 35\nAnswer: 34", 1), ("34", 0),
        (r"Answer: \boxed{34}", 1), ("Answer: x = 34", 1), ("Answer: 34 cm", 1), ("Answer: 3,4", 1), ("Answer: -34", 0),
        ("Answer: 34" + " " * 400, 0), ("x" * 1000 + "Answer: 34", 1), (r"\boxed{34}", 0), ("Answer: 34 dollars", 1),
        ("Answer: 34\nAnswer: 3", 0), ("Answer:", 0), ("", 0),
    ],
)  # fmt: skip
def test_dapo_compares_the_answer_line(prompt, text, right):
    assert load_reward("dapo")(prompt("34"), text) == right
    assert load_reward("dapo", {"wrong": -1.0})(prompt("34"), text) == (1 if right else -1)


def test_dapo_normalises_as_minerva_does():
    assert normal_form(r"\frac12") == normal_form(r"$\frac{1}{2}$") == "\\frac{1}{2}"
    assert normal_form(r"\sqrt3") == r"\sqrt{3}"
    assert normal_form(r"a = 1,000 \text{ meters}") == "1000"
    assert normal_form(r"90^\circ") == "90"
    with pytest.raises(ValueError, match="is empty without its units"):
        load_reward("dapo").check_answer("units")


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (r"\boxed{B}", 1), (r"\boxed{(B)}", 1), (r"\boxed{\text{B}}", 1), (r"\boxed{\text{(B)}}", 1), ("Answer: B", 1),
        ("Answer: b", 1), ("Answer: (B) because", 1), ("Answer: B. Paris", 1), ("**Answer:** **B**", 1),
        ("Answer: $B$", 1),
        ("Answer: C", 0), ("Answer: Both", 0), ("Answer: B or C", 0), ("B", 0), ("Answer: a dog", 0), ("Answer: B2", 0),
        ("", 0), (r"Answer: B \boxed{C}", 0),
    ],
)  # fmt: skip
def test_multiple_choice_reads_a_letter(prompt, text, right):
    grader = load_reward("multiple_choice", {"choices": "ABCD"})
    assert [grader(prompt(answer), text) for answer in ("B", "(B)", "b.")] == [right] * 3
    with pytest.raises(ValueError, match="is none of the choices"):
        grader.check_answer("E")


def test_a_result_in_the_form_of_verl_has_a_score(prompt):
    function = adapt(lambda data_source, solution_str, ground_truth, extra_info: {"acc": 1.0}, "mine:score")
    assert attempt(function, prompt("1"), "1").detail.endswith(UNFIT)


def test_exact_and_regex(prompt):
    assert load_reward("exact")(prompt(" a b"), "a b\n") == 1
    assert load_reward("exact")(prompt("a b"), "A b") == 0
    assert load_reward("exact", {"ignore_case": True})(prompt("a b"), "A b") == 1
    regex = load_reward("regex", {"pattern": r"<answer>(.*?)</answer>"})
    assert regex(prompt("7"), "<answer>6</answer> <answer> 7 </answer>") == 1
    assert regex(prompt("7"), "<answer>7</answer> <answer>6</answer>") == 0
    assert regex(prompt("7"), "7") == 0
    for settings, why in [({}, "pattern"), ({"pattern": "("}, "not a regular expression"), ({"patern": "x"}, "patern")]:
        with pytest.raises(RewardError, match=rf"Regex\(\) failed: .*{why}"):
            load_reward("regex", settings)
    slow = {"name": "regex", "settings": {"pattern": "(a+)+$"}}
    assert score(slow, prompt("7"), "a" * 60 + "b", timeout_s=0.5)[1] == [True]


def test_functions_of_verl_run_unmodified(prompt):
    row = replace(prompt("42", extra_info={"bonus": 0.25}), source="sums")
    assert score({"name": f"{FOREIGN}:compute_score"}, row, "42", "41")[0] == [2.25, 1.25]
    assert score({"name": f"{FOREIGN}:per_dataset_score"}, row, "42", "41")[0] == [1, 0]
    partly = {"name": f"{FOREIGN}:per_dataset_score", "settings": {"format_score": 0.125}}
    assert score(partly, row, "42", "41")[0] == [1, 0.125]
    assert score({"name": f"{FOREIGN}:compute_score_async"}, row, "42", "41")[0] == [1, 0]
    bound = {"name": f"{FOREIGN}:per_dataset_score", "settings": {"ground_truth": "41"}}
    assert score(bound, row, "42", "41")[0] == [0, 1]
    assert score({"name": f"{FOREIGN}:compute_score"}, prompt("42"), "42")[0] == [1]  # without the column extra_info


@pytest.mark.parametrize(
    ("parameters", "given"),
    [
        ("solution_str", "text"),
        ("solution_str, ground_truth", "text 42"),
        ("ground_truth, data_source", "42 sums"),
        ("solution_str, extra_info", "text {'a': 1}"),
        ("data_source, solution_str, extra_info=None, **more", "sums text {'a': 1}"),
        ("p, text", None),
        ("prompt, response_text, ground_truth=1, extra_info=2", None),
        ("completion, gold", "the prompt would be passed as parameter completion"),
        ("response, answer", "the prompt would be passed as parameter response"),
        ("args, sample", "the prompt would be passed as parameter args"),
        ("text, label", "the prompt would be passed as parameter text"),
        ("prompt, ground_truth", "the response would be passed as parameter ground_truth"),
        ("solution_str, answer", "the prompt would be passed as parameter solution_str"),
        ("solution_strs, ground_truths", "the prompt would be passed as parameter solution_strs"),
        ("prompts, answers", "the prompt would be passed as parameter prompts"),
        ("data_source, solution_str, extra_info, reward_model_tokenizer=None", "sums text {'a': 1} None"),
        ("solution_str, ground_truth, reward_model_tokenizer", "reward_model_tokenizer: not passed here; give"),
        ("prompts, completions, completion_ids", "completion_ids: not passed here; give"),
        ("completions, trainer_state, **columns", "trainer_state: not passed here; give"),
        ("data_source, solution_str, reward_router_address", "reward_router_address: not passed here; give"),
        ("prompt, response_text, tokenizer", "tokenizer: not passed here; give"),
        ("model_output, gt", "the prompt would be passed as parameter model_output"),
        ("y_pred, y_true", "the prompt would be passed as parameter y_pred"),
        ("prompt, correct_answer", "the response would be passed as parameter correct_answer"),
        ("prompt_text, model_answer", None),
    ],
)
def test_a_reward_function_receives_the_values_that_its_parameters_name(prompt, monkeypatch, parameters, given):
    names = [name.partition("=")[0] for name in parameters.split(", ") if "*" not in name]
    module = types.ModuleType("named_by_parameters")
    got = []
    module.reward = eval(f"lambda {parameters}: got.append(({', '.join(names)},)) or 0.0", {"got": got})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    row = replace(prompt("42", extra_info={"a": 1}), source="sums")
    if given and "passed" in given:
        with pytest.raises(RewardError, match=f"reward.name = named_by_parameters:reward: {given}"):
            load_reward("named_by_parameters:reward")
        return
    load_reward("named_by_parameters:reward")(row, "text")
    assert got[0][:2] == (row, "text") if given is None else " ".join(map(str, got[0])) == given


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda completions, solution: [1.0], "the row has no column solution, which it takes"),
        (lambda completions: 1.0, "it returned 1.0, expected a list of one number"),
        (lambda completions: [1.0, 2.0], "it returned [1.0, 2.0], expected a list of one number"),
    ],
)
def test_a_function_of_trl_that_fits_no_row_is_named(prompt, function, why):
    detail = attempt(adapt(function, "mine:score"), prompt("1"), "1").detail
    assert why in detail
    assert detail.endswith(UNFIT)


def test_functions_of_trl_run_unmodified(prompt):
    plain = replace(prompt("42"), columns={"prompt": "abc", "answer": "42", "task": "code"})
    turns = prompt("42", prompt=[{"role": "user", "content": "abc"}], task="math")
    assert score({"name": f"{FOREIGN}:length_reward"}, plain, "four")[0] == [np.float32(5.4)]
    assert score({"name": f"{FOREIGN}:format_reward"}, turns, "<think>x</think>y", "y")[0] == [1, 0]
    assert score({"name": f"{FOREIGN}:async_reward"}, plain, "x")[0] == [0.5]
    assert score({"name": f"{FOREIGN}:logging_reward"}, plain, "x")[0] == [0.5]
    assert score({"name": f"{FOREIGN}:math_only"}, turns, "x")[:2] == ([1], [False])
    assert score({"name": f"{FOREIGN}:math_only"}, plain, "x") == ([0], [True], {"reward/failed_not_applicable": 1})
    assert score({"name": f"{FOREIGN}:wrong_count"}, plain, "x")[1:] == ([True], {"reward/failed_raised": 1})
    assert score({"name": f"{FOREIGN}:format_reward"}, plain, "x")[1] == [True]  # it expects messages


def test_several_rewards_are_weighted_and_each_is_recorded(prompt):
    terms = [
        {"name": "arithmetic", "weight": 2.0},
        {"name": f"{FOREIGN}:scaled", "weight": -0.5, "settings": {"factor": 0.25}},
        {"name": f"{FOREIGN}:math_only", "weight": 10.0},
    ]
    row = prompt("42", task="code")
    rewards, failed, metrics = score({"terms": terms}, row, "42", "4", "nothing!")
    assert rewards == [2 - 0.25, -0.125, -1.0]
    assert not any(failed)
    assert metrics == {"reward/arithmetic": 1 / 3, f"reward/{FOREIGN}:scaled": (0.5 + 0.25 + 2) / 3}
    # A failing term fails the sample, and is named.
    rewards, failed, metrics = score({"terms": terms}, prompt("no number", task="math"), "42")
    assert (rewards, failed, metrics["reward/failed_raised"]) == ([0], [True], 1)


def test_the_data_source_chooses_the_verifier(prompt, caplog):
    terms = [{"name": "gsm8k", "sources": ["gsm8k"]}, {"name": "math", "sources": ["math", "aime"]}]
    rows = [replace(prompt(answer), source=source) for source, answer in [("gsm8k", "#### 34"), ("aime", r"\frac12")]]
    assert score({"terms": terms}, rows[0], "#### 34", r"Answer: 34")[0] == [1, 0]
    assert score({"terms": terms}, rows[1], "#### 0.5", r"Answer: 0.5")[0] == [0, 1]
    assert score({"terms": terms}, replace(rows[0], source="code"), "34")[1] == [True]
    assert "no term of reward.terms is for the data source 'code'" in caplog.text
    with RewardPool(RewardConfig(terms=terms)) as pool:
        answers = [("gsm8k", "#### 34"), ("gsm8k", "x"), ("aime", "34"), ("math", "?"), ("code", "34"), ("math", "")]
        problems = pool.check_answers(answers)
    assert [problem is None for problem in problems] == [True, False, True, False, False, False]
    assert problems[4] == "no term of reward.terms is for the data source 'code'"


@pytest.mark.parametrize("name", ["arithmetic", "dapo", "math"])
def test_a_solution_in_place_of_an_answer_is_a_problem_with_its_grader(name):
    with RewardPool(RewardConfig(name=name)) as pool:
        problems = pool.check_answers([("", "48/2 = <<48/2=24>>24\n#### 72"), ("", "72")])
    assert problems[0].endswith("; set reward.name to gsm8k, which reads the number after ####")
    assert problems[1] is None


def test_ungradable_is_counted_apart_from_wrong(prompt):
    assert score({"name": "math"}, prompt("34"), "Answer: 35") == ([0], [False], {})
    assert score({"name": "math"}, prompt("?"), "Answer: 35") == ([0], [True], {"reward/failed_ungradable": 1})


@pytest.mark.slow
def test_an_answer_that_hangs_or_kills_its_reader_is_a_problem_of_its_own():
    with RewardPool(RewardConfig(name=f"{FOREIGN}:ReadsAnswers", timeout_s=0.5)) as pool:
        problems = pool.check_answers([("", answer) for answer in ("34", "hang", "exit", "raise", "35")])
    assert problems == [
        None,
        "waited 0.5 s for answers to be read",
        "the verifier's process ended (exit code 3)",
        "KeyboardInterrupt: ",
        None,
    ]


@dataclass
class Judge:
    """A server on loopback that returns len(response) as reward, after the given number of refusals."""

    reply: bytes | None = None
    refusals: int = 0
    status: int = 503
    delay_s: float = 0.0
    requests: list = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append((body, request.headers.get("Authorization")))
        await asyncio.sleep(self.delay_s)
        rewards = [None if r == "none" else len(r) for r in body["responses"]]
        content = json.dumps({"rewards": rewards}).encode() if self.reply is None else self.reply
        self.refusals -= 1
        return web.Response(status=self.status if self.refusals >= 0 else 200, body=content)


def ask(judge, prompt, *texts, timeout_s=5.0, **settings):
    async def main():
        app = web.Application()
        app.router.add_post("/score", judge.answer)
        async with TestServer(app) as server:
            given = {"url": str(server.make_url("/score")), **settings}
            with RewardPool(RewardConfig(name="http", timeout_s=timeout_s, settings=given)) as pool:
                rewards, failed = await pool.score(prompt, texts)
                return rewards.tolist(), failed.tolist(), pool.take_metrics()

    return asyncio.run(main())


def test_a_judge_gets_all_responses_to_a_prompt_at_once(prompt, monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "secret")
    row = replace(prompt("42", prompt=[{"role": "user", "content": "x"}], level=3), source="math")
    judge = Judge()
    assert ask(judge, row, "a", "bb", "", token_env="JUDGE_TOKEN", columns=["level"])[0] == [1, 2, 0]
    ((body, authorization),) = judge.requests
    assert authorization == "Bearer secret"
    assert body == {
        "prompt": "", "messages": [{"role": "user", "content": "x"}], "answer": "42", "data_source": "math",
        "responses": ["a", "bb", ""], "level": 3,
    }  # fmt: skip
    assert ask(judge, row, *"abcde", batch=2)[0] == [1] * 5
    assert sorted(len(body["responses"]) for body, _ in judge.requests[1:]) == [1, 2, 2]
    assert ask(judge, row, "a", "none")[1:] == ([False, True], {"reward/failed_not_applicable": 1})


def test_a_token_that_no_request_can_bring_is_refused_and_not_shown(monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "hidden\n")
    with pytest.raises(RewardError, match="token_env = 'JUDGE_TOKEN': must be one line of ASCII") as refused:
        build_rewards(RewardConfig(name="http", settings={"url": "http://x", "token_env": "JUDGE_TOKEN"}))
    assert "hidden" not in str(refused.value)


def test_a_judge_that_is_busy_is_asked_again(prompt, caplog):
    judge = Judge(refusals=2)
    assert ask(judge, prompt("1"), "a")[:2] == ([1], [False])
    assert len(judge.requests) == 3
    judge = Judge(refusals=9)
    assert ask(judge, prompt("1"), "a", "b", attempts=2)[1] == [True, True]
    assert len(judge.requests) == 2
    judge = Judge(refusals=1, status=404)
    assert ask(judge, prompt("1"), "a")[1] == [True]
    assert len(judge.requests) == 1
    assert "status 503" in caplog.text
    assert "status 404" in caplog.text
    assert ask(judge, prompt("1"), "a", attempts=1, url="http://127.0.0.1:9/score")[1] == [True]  # where none listens
    assert "ClientConnectorError" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "reply",
    [
        b"", b"no", b"[1]", b'{"rewards": 1}', b'{"rewards": [1, 2]}', b'{"rewards": ["1"]}', b'{"rewards": [NaN]}',
        b"{" * 9,
    ],
)  # fmt: skip
def test_a_judge_with_a_malformed_reply_fails_its_samples(prompt, reply):
    judge = Judge(reply=reply)
    assert ask(judge, prompt("1"), "a")[:2] == ([0], [True])


def test_a_judge_has_its_time(prompt):
    judge = Judge(delay_s=3)
    started = time.monotonic()
    assert ask(judge, prompt("1"), "a", timeout_s=0.5)[1:] == ([True], {"reward/failed_timeout": 1})
    assert time.monotonic() - started < 2


@pytest.mark.parametrize(
    ("settings", "why"),
    [({}, "url"), ({"url": "x"}, "must be http"), ({"url": "http://x", "token_env": "NO_SUCH"}, "no such")],
)
def test_a_judge_s_settings_are_checked(settings, why):
    with pytest.raises(RewardError, match=why):
        build_rewards(RewardConfig(name="http", settings=settings))


@pytest.mark.parametrize(
    ("name", "written"),
    [("first/reward.py", "first.reward:NAME, the NAME in"), ("first.reward.reward", "first.reward:reward")],
)
def test_a_name_without_a_colon_is_shown_with_one(name, written):
    with pytest.raises(RewardError, match=f"reward.name = {name}: unknown; write {written}"):
        load_reward(name)
    with pytest.raises(EnvironmentNameError, match=f"environment.name = {name}: no module; write {written}"):
        load_attribute("environment.name", name, EnvironmentNameError)
