import json
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from dppo_megatron.config.schema import RewardConfig
from dppo_megatron.rollout.rewards import Reward, RewardError, build_rewards
from dppo_megatron.rollout.rewards.arithmetic import arithmetic
from dppo_megatron.rollout.rewards.gsm8k import final_answer, gsm8k
from dppo_megatron.rollout.rewards.registry import load_reward

SAMPLE = Path(__file__).parents[2] / "data" / "gsm8k_sample.jsonl"


@pytest.mark.parametrize(
    ("text", "reward"), [("42", 1), (" 42\n", 1), ("042", 0), ("42.", 0), ("42 3", 0), ("", 0), ("4 2", 0), ("-42", 0)]
)
def test_arithmetic_is_exact(prompt, text, reward):
    assert arithmetic(prompt("42"), text) == reward


def test_arithmetic_needs_an_integer_answer(prompt):
    assert arithmetic(prompt(" -7"), "-7") == 1
    with pytest.raises(ValueError, match=r"'7\.5' is not an integer"):
        arithmetic(prompt("7.5"), "7.5")


@pytest.mark.parametrize(
    "text",
    [
        "#### 72", "adds up.\n####72.", "#### $72", "#### 72%", "#### 72.00", "#### 72 clips", "#### 72 - that is all",
        "#### 71\nwait\n#### 72", r"\boxed{72}", r"so \boxed{72} clips.", r"\boxed{\$72.00}", r"\boxed{72\%}",
        r"\boxed{\frac{144}{2}}", r"\boxed{72\text{ clips}}", r"\boxed{x = 72}", r"#### 71, no: \boxed{72}",
    ],
)  # fmt: skip
def test_gsm8k_accepts(prompt, text):
    assert gsm8k(prompt("48 + 24\n#### 72"), text) == 1


@pytest.mark.parametrize(
    "text",
    [
        "", "72", "The answer is 72", "### 72", "#### -72", "#### 7 2", "#### 72/2", "#### 72e3", "#### 72 + 5",
        "#### 720", "#### 72.5", "#### seventy-two", "#### 72\n#### 71", r"\boxed{72} or \boxed{71}",
        r"\boxed{71, 72}", r"\boxed{71 \text{ or } 72}", r"\boxed{72", r"\boxed{}", r"\boxed{seventy}",
        r"\boxed{0.72}", r"boxed{72}", "\\boxed{" * 500,
    ],
)  # fmt: skip
def test_gsm8k_rejects(prompt, text):
    assert gsm8k(prompt("48 + 24\n#### 72"), text) == 0


@pytest.mark.parametrize(
    "text",
    [
        "#### 2. Solve for x", "#### 2) Solve", "#### 2: Solve", "#### 2.\tSolve", "#### 5,5", r"\boxed{5,5}",
        r"\boxed{5, 5}", r"\boxed{5{,}5}", "#### 12,34", "#### 5,5,5",
    ],
)  # fmt: skip
def test_a_heading_or_a_list_is_no_number(prompt, text):
    assert final_answer(text) is None or not gsm8k(prompt("#### 5"), text)
    assert gsm8k(prompt("#### 2"), text) == 0
    if text.startswith("####"):
        assert gsm8k(prompt("#### 72"), rf"\boxed{{72}}, as I said.\n{text}") == 1


@pytest.mark.parametrize(
    "text",
    [
        "#### " + "1," * 4000 + "1", r"\boxed{" + "1," * 4000 + "1}", r"\boxed{" + "1," * 100 + "1}",
        r"\boxed{" + "{" * 16 + "1" + "}" * 16 + "}", r"\boxed{" + "(" * 100 + "1" + ")" * 100 + "}",
        "#### " + "9" * 250_000, "#### " + ",".join(["999"] * 75_000), r"\boxed{" * 50_000,
        r"\boxed{1" * 25_000 + "}" * 25_000, "#### 1" * 25_000, "{" * 250_000, r"\boxed" + " " * 250_000 + "{",
    ],
)  # fmt: skip
def test_no_answer_is_too_long_or_too_deep_to_be_refused_at_once(prompt, text):
    started = time.monotonic()
    assert gsm8k(prompt("#### 7"), text) == 0
    assert time.monotonic() - started < 2


@pytest.mark.parametrize("text", ["#### {}x", "#### - {}x", "#### - {}$ {}x", "#### 72{}- {}5", "####{}" * 20])
def test_many_blanks_are_read_in_no_time(prompt, text):
    started = time.monotonic()
    assert gsm8k(prompt("#### 72"), text.replace("{}", 20_000 * "\n")) == 0
    assert time.monotonic() - started < 1


@pytest.mark.parametrize(
    "text",
    [
        *("#### 1,234,567", "#### $1,234,567", "#### 1234567.0", "#### 1\u2009234\u2009567", "#### １２３４５６７"),
        *(r"\boxed{1{,}234{,}567}", r"\boxed{1,\!234,\!567}", "\\boxed{1\u202f234\u202f567}"),
        *(r"\boxed{\$\,1,234,567}", r"\boxed{1234567\,\text{cm}}", r"\boxed{1\,234\,567}"),
    ],
)
def test_thousands_separators(prompt, text):
    assert gsm8k(prompt("#### 1,234,567"), text) == 1
    assert gsm8k(prompt("1234567"), text) == 1
    assert gsm8k(prompt("#### 12345671"), text) == 0


@pytest.mark.parametrize("text", ["#### \u22125", "\\boxed{\u22125}", r"\boxed{-5\,\text{cm}}", r"\boxed{-\$\,5}"])
def test_minus_signs_and_spaces(prompt, text):
    assert gsm8k(prompt("#### \u22125"), text) == 1
    assert gsm8k(prompt("-5"), text) == 1
    assert gsm8k(prompt("5"), text) == 0


def test_fractions(prompt):
    assert gsm8k(prompt("#### 0.5"), r"\boxed{\frac12}") == 1
    assert gsm8k(prompt("#### 0.5"), "#### .50") == 1


def test_gsm8k_needs_a_number_to_compare_with(prompt):
    with pytest.raises(ValueError, match="expected `#### number`"):
        gsm8k(prompt("no idea"), "#### 1")


def test_reference_solutions_score(prompt):
    for line in SAMPLE.read_text().splitlines():
        answer = json.loads(line)["answer"]
        number = answer.rpartition("#### ")[2]
        assert gsm8k(prompt(answer), answer) == 1
        assert gsm8k(prompt(answer), rf"Hence \boxed{{{number}}}.") == 1
        assert gsm8k(prompt(answer), f"#### {number}1") == 0
        assert gsm8k(prompt(answer), answer.replace("####", "so")) == 0


def test_rewards_are_found_by_name_and_path(tmp_path, monkeypatch, prompt):
    assert build_rewards(RewardConfig(name="arithmetic"))[0] is arithmetic
    assert build_rewards(RewardConfig(name="dppo_megatron.rollout.rewards.gsm8k:gsm8k"))[0] is gsm8k
    assert isinstance(arithmetic, Reward)
    (tmp_path / "my_own_rewards.py").write_text("def length(prompt, text):\n    return len(text)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [p for p in sys.path if p])
    assert build_rewards(RewardConfig(name="my_own_rewards:length"))[0](prompt(""), "four") == 4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gsm8", "did you mean 'gsm8k'"),
        ("chess", "built in are arithmetic, gsm8k.*package.module:function"),
        ("no_such_module:f", "cannot import no_such_module: ModuleNotFoundError"),
        ("mine/own.py:f", "ModuleNotFoundError.*Drop .py, as in an import: mine.own:f"),
        ("/mine/own.py:f", "ModuleNotFoundError.*Add /mine to PYTHONPATH, and write own:f"),
        ("dppo_megatron.rollout.rewards.gsm8k:gsm9k", "has no 'gsm9k'; did you mean 'gsm8k'"),
        ("dppo_megatron.rollout.rewards.registry:BUILTIN", "dict is not callable"),
    ],
)
def test_bad_names_come_with_a_remedy(name, message):
    with pytest.raises(RewardError, match=message):
        build_rewards(RewardConfig(name=name))


def test_answers_are_checked_for_rewards_with_settings_and_of_other_trainers(monkeypatch):
    def check_answer(answer: str) -> None:
        raise ValueError(f"{answer} is no answer")

    def own(prompt, response_text, scale=1.0):
        return scale

    def of_verl(data_source, solution_str, ground_truth, extra_info):
        return 1.0

    own.check_answer = of_verl.check_answer = check_answer
    rewards = ModuleType("rewards_of_a_test")
    rewards.own, rewards.of_verl = own, of_verl
    monkeypatch.setitem(sys.modules, "rewards_of_a_test", rewards)
    for name, settings in (("own", {"scale": 2.0}), ("of_verl", {}), ("of_verl", {"extra_info": 1})):
        reward = load_reward(f"rewards_of_a_test:{name}", settings)
        with pytest.raises(ValueError, match="x is no answer"):
            reward.check_answer("x")
