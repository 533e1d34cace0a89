"""Groups of trajectories with real environment processes and a scripted policy."""

import asyncio
import functools
import os
import re
import signal
import time
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from dppo_megatron.bank.checks import check_group
from dppo_megatron.bank.journal import Journals
from dppo_megatron.config.task import EnvironmentConfig
from dppo_megatron.rollout.environments import EnvironmentFailed
from dppo_megatron.rollout.environments.episodes import Episodes
from dppo_megatron.rollout.environments.interface import EnvironmentNameError
from dppo_megatron.rollout.environments.pool import EnvironmentPool
from dppo_megatron.rollout.environments.tools import Tools
from dppo_megatron.rollout.environments.worker import environment_problem
from dppo_megatron.rollout.gateway import Gateway
from dppo_megatron.rollout.rewards import RewardPool
from dppo_megatron.types import Prompt, Rollout, RolloutGroup
from tests.rollout.environments import worlds
from tests.support.configs import make_config

WORLDS = "tests.rollout.environments.worlds"
EOS = 1
TOOLS = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


class Killed(Exception):
    pass


def play(
    tokenizer, world: str, turns, *, answers=("7",), samples: int = 2, chat: bool = False, text="Hi",
    journals: Path | None = None, killed_at: int | None = None, agent: bool = False, credit="trajectory",
    columns=None, delay_s=0.0, **environment
):  # fmt: skip
    """Return the groups of prompts with `answers`; turn t of every trajectory is turns[t], cut to the request's limit.

    world: of `worlds`, or with its module. turns: or a function of the text before the turn. columns: of every row.
    The last request for turn `killed_at` raises Killed. journals: their directory. delay_s: of every turn.
    """
    rollout = {"group_size": samples, "max_response_tokens": environment.pop("longest", 200), "topk_logprobs": 2}
    world = world if ":" in world else f"{WORLDS}:{world}"
    config = make_config(
        rollout=rollout,
        data={"train": "unused", "chat_template": chat},
        environment={"agent" if agent else "name": world, "workers": 4, **environment},
        reward={"name": "tests.support.rewards:even_digits"},
        objective={"credit": credit},
    )
    tokenizer.chat_template = TOOLS if chat else None
    requests = []

    async def sample(make, what):
        request = make(0)
        requests.append(request)
        await asyncio.sleep(delay_s)
        turn = int(request.request_id.split(".")[2].split("-")[0])
        if turn == killed_at:
            if sum(f".{turn}-" in r.request_id for r in requests) < samples:  # until all have come so far
                await asyncio.sleep(60)
            raise Killed
        said = turns(tokenizer.decode(request.token_ids)) if callable(turns) else turns[min(turn, len(turns) - 1)]
        ids = [*tokenizer.encode(said, add_special_tokens=False), EOS]
        cut = ids[: request.max_tokens]
        lists = np.tile(np.array([2, 3], np.int32), (len(cut), 1))
        of_sampled = -np.where(np.isin(cut, [2, 3]), cut, 1).astype(np.float32)
        return (
            Rollout(
                np.array(cut, np.int32), of_sampled, np.zeros(len(cut), np.int32),
                "stop" if cut[-1] == EOS else "length", lists, -lists.astype(np.float32),
            ),
        )  # fmt: skip

    async def run() -> tuple[list[RolloutGroup], dict]:
        async with AsyncExitStack() as pools:
            environments = pools.enter_context(EnvironmentPool(config.environment))
            rewards = pools.enter_context(RewardPool(config.reward))
            gateway = await pools.enter_async_context(Gateway("127.0.0.1")) if agent else None
            tools = [] if agent else await environments.tools()
            episodes = Episodes(
                config, sample=sample, environments=environments, tokenizer=tokenizer, tools=tools,
                stop_token_ids=(EOS,), routing=None, journals=None if journals is None else Journals(journals, ()),
                gateway=gateway,
            )  # fmt: skip
            groups = []
            for position, answer in enumerate(answers):
                row = {"prompt": text, **(columns or {})}
                begin = tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], tools=tools, tokenize=False, add_generation_prompt=True
                ) if chat else text  # fmt: skip
                ids = np.array(tokenizer.encode(begin, add_special_tokens=False), np.int32)
                groups.append(await episodes.play(Prompt(position, position, ids, begin, answer, row), rewards))
            return groups, episodes.take_metrics()

    groups, metrics = asyncio.run(run())
    for group in groups:
        check_group(group)
    return groups, metrics, requests


def assert_exact(group: RolloutGroup, requests) -> None:
    """Every turn of one branch was sampled behind the tokens before it, which are stored as they were read."""
    for request in requests:
        _, sample, turn = request.request_id.split("-")[1].split(".")
        rollout = group.rollouts[int(sample)]
        before = 0
        for origin, size, of_turn in rollout.spans.tolist():
            if (origin, of_turn) == (0, int(turn)):
                break
            before += size
        behind = np.concatenate([group.prompt.token_ids, rollout.token_ids[:before]])
        assert np.array_equal(request.token_ids, behind), request.request_id


def text_of(tokenizer, group, sample: int = 0) -> str:
    return tokenizer.decode(group.rollouts[sample].token_ids)


def test_turns_alternate_and_their_rewards_add_up(tokenizer):
    (group,), metrics, requests = play(tokenizer, "Echo", ["ab", "c"], settings={"turns": 2})
    assert text_of(tokenizer, group) == "ab<eos>[ab]c<eos>"
    assert group.rollouts[0].spans.tolist() == [[0, 3, 0], [1, 4, 0], [0, 2, 1]]
    assert [r.trajectory for r in group.rollouts] == [0, 1]
    assert [r.finish_reason for r in group.rollouts] == ["stop", "stop"]
    assert [rewards.tolist() for rewards in group.turn_rewards] == [[1.0, 2.0]] * 2
    assert group.rewards.tolist() == [3.0, 3.0]
    assert metrics == {
        "environment/turns_mean": 2.0, "environment/rewritten_histories": 0.0, "environment/replayed_turns": 0.0,
        "environment/max_turns_share": 0.0,
    }  # fmt: skip
    # Each request's prompt is all tokens so far.
    second = [r for r in requests if r.request_id.split(".")[2].startswith("1")]
    assert [tokenizer.decode(r.token_ids) for r in second] == ["Hiab<eos>[ab]"] * 2
    assert len({seed for r in requests for seed in r.seeds}) == len(requests) == 4
    of_turns = {r.request_id.rpartition(".")[0]: r.affinity for r in requests}
    assert of_turns == {f"group-0.{i}": ("group-0", f"group-0.{i}") for i in range(2)}


@pytest.mark.slow
def test_where_turns_are_credited_each_has_a_reward(tokenizer):
    (group,), _, _ = play(tokenizer, "Unscored", ["ab"], max_turns=1, credit="turn")  # truncated before any
    assert [rewards.tolist() for rewards in group.turn_rewards] == [[0.0]] * 2
    with pytest.raises(EnvironmentNameError, match=r"objective.credit = turn: .*Unscored gave no turn of prompt 0"):
        play(tokenizer, "Unscored", ["ab"], credit="turn")


@pytest.mark.slow
def test_limits_truncate(tokenizer):
    (group,), metrics, _ = play(tokenizer, "Echo", ["ab"], settings={"turns": 9}, max_turns=2)
    assert text_of(tokenizer, group) == "ab<eos>[ab]ab<eos>"
    assert group.rollouts[0].finish_reason == "max_turns"  # it is not as long as a response may be
    assert metrics["environment/max_turns_share"] == 1
    assert group.rewards[0] == 3.0
    (group,), metrics, _ = play(tokenizer, "Echo", ["abcdef"], settings={"turns": 9}, max_turn_tokens=4)
    assert metrics["environment/max_turns_share"] == 0
    assert text_of(tokenizer, group) == "abcd"
    assert group.rollouts[0].finish_reason == "length"
    for longest, expected in ((8, "ab<eos>[ab]a"), (7, "ab<eos>"), (5, "ab<eos>")):
        (group,), _, requests = play(tokenizer, "Echo", ["ab"], settings={"turns": 9}, longest=longest)
        assert text_of(tokenizer, group) == expected
        assert all(len(r.token_ids) + r.max_tokens == 2 + longest for r in requests)


@pytest.mark.slow
def test_reset_adds_to_the_prompt_and_the_reward_comes_last(tokenizer):
    groups, _, _ = play(tokenizer, "Opened", ["ab"], answers=("7", "8"), chat=True)
    for group, answer in zip(groups, "78", strict=True):
        assert tokenizer.decode(group.prompt.token_ids) == f"<user>Hi({answer})<assistant>" == group.prompt.text
        assert text_of(tokenizer, group) == "ab<eos><user>[ab]<assistant>ab<eos>"
        assert group.turn_rewards is None
        assert group.rewards.tolist() == [0.5, 0.5]


@pytest.mark.slow
def test_async_methods_of_all_trajectories_of_a_process_share_one_loop(tokenizer):
    groups, _, _ = play(tokenizer, "Connected", ["ab"], answers=("7", "8"))
    assert [group.rewards.tolist() for group in groups] == [[1.0, 1.0]] * 2


def no_type(x):
    return x


def positional(x: int, /):
    return x


def several(*x: int):
    return x


def unwritable(x: type):
    return x


def unknown(x: "Missing"):  # noqa: F821
    return x


def yields(x: int):
    yield x


def named(name: str):
    def function(x: int):
        return x

    function.__name__ = name
    return function


@pytest.mark.parametrize(
    ("functions", "problem"),
    [
        ([lambda x: x], "tools: <lambda> is not the name of one function"),
        ([functools.partial(worlds.double, 1)], r"tools: functools.partial\(.*\) is not the name of one function"),
        ([worlds.double, worlds.double], "tools: double is not the name of one function"),
        ([worlds.Table()], "is not the name of one function"),
        ([no_type], r"tools: no_type\(x\): a call needs name and type; write it as \(city: str\)"),
        ([positional], r"tools: positional\(x: int\): a call needs name and type"),
        ([several], r"tools: several\(\*x: int\): a call needs name and type"),
        ([unwritable], "tools: unwritable: Cannot generate a JsonSchema for .*'type'"),
        ([unknown], "tools: unknown: name 'Missing' is not defined"),
        ([yields], "tools: yields yields; return the whole result"),
        ([named("functions.f")], "tools: functions.f is not the name of one function"),
        ([named("server.f")], None),
        ([worlds.double, worlds.Table().look_up], None),
    ],
)
def test_tools_that_a_call_cannot_reach_are_refused(functions, problem):
    if problem is None:
        assert len(Tools(functions).schemas) == len(functions)
    else:
        with pytest.raises(TypeError, match=problem):
            Tools(functions)


@pytest.mark.slow
@pytest.mark.smoke
def test_tools_are_described_called_and_answered(tokenizer):
    call = '<tool_call>{"name": "look_up", "arguments": {"key": "b", "times": 2}}</tool_call>'
    (group,), metrics, _ = play(
        tokenizer,
        "Table",
        [call, '{"name": "double", "parameters": {"x": 4}}', '<tool_call>{"name": "look_up"}</tool_call>', "done 42"],
        chat=True,
        longest=600,
    )
    assert tokenizer.decode(group.prompt.token_ids) == "[look_up][double]<user>Hi<assistant>"
    text = text_of(tokenizer, group)
    assert "<eos><tool>4<assistant>{" in text
    assert "<eos><tool>8<assistant><tool_call>" in text
    assert "<tool>error: ValueError: expected an object with name and arguments<assistant>done 42<eos>" in text
    assert group.rewards.tolist() == [0.5, 0.5]  # by `reward:`, of "done 42"
    counted = {name: metrics[f"environment/{name}_mean"] for name in ("turns", "calls", "call_errors")}
    assert counted == {"turns": 4.0, "calls": 3.0, "call_errors": 1.0}
    assert not group.reward_failed.any()


@pytest.mark.slow
def test_a_call_in_reasoning_that_the_prompt_opened_is_not_executed(tokenizer, monkeypatch):
    opening = TOOLS.replace("<assistant>", "<assistant><think>")
    monkeypatch.setattr("tests.rollout.environments.test_episodes.TOOLS", opening)
    call = '<tool_call>{"name": "double", "arguments": {"x": 4}}</tool_call>'
    turns = [f"hm {call} no</think>{call}", f"I may {call} but"]
    (group,), _, requests = play(tokenizer, "Table", turns, samples=1, chat=True, longest=900)
    assert len(requests) == 2
    assert text_of(tokenizer, group, -1).endswith(f"{turns[0]}<eos><tool>8<assistant><think>{turns[1]}<eos>")


HOW = ["raise reset", "die reset", "raise step", "die step", "raise reward", "die reward", "nan"]


@pytest.mark.slow
def test_a_faulty_environment_fails_only_its_own_trajectory(tokenizer):
    groups, metrics, _ = play(tokenizer, "Hostile", ["ab"], answers=(*HOW, "well"), max_turns=2)
    for how, group in zip((*HOW, "well"), groups, strict=True):
        assert group.reward_failed.tolist() == [how != "well"] * 2, how
        sampled = 0 if how.endswith("reset") else 3 if how.endswith("step") else 6
        assert [len(r.versions) for r in group.rollouts] == [sampled] * 2, how
    assert groups[-1].rewards.tolist() == [1.0, 1.0]
    failed = {name: count for name, count in metrics.items() if "failed" in name}
    assert failed == {
        "environment/failed_raised": 6.0, "environment/failed_died": 6.0, "environment/failed_not_finite": 2.0,
    }  # fmt: skip


@pytest.mark.slow
def test_a_surrogate_is_escaped_and_a_message_that_the_template_refuses_fails(tokenizer, monkeypatch):
    (group,), _, _ = play(tokenizer, "Unprintable", ["ab"], settings={"turns": 9})
    assert "ud800" in text_of(tokenizer, group)
    assert not group.reward_failed.any()
    refusing = TOOLS.replace("<{{ m.role }}>", "{% if loop.index > 1 %}{{ raise_exception('no') }}{% endif %}")
    monkeypatch.setattr("tests.rollout.environments.test_episodes.TOOLS", refusing)
    (group,), metrics, _ = play(tokenizer, "Echo", ["ab"], chat=True)
    assert group.reward_failed.all()
    assert [len(r.versions) for r in group.rollouts] == [3, 3]
    assert metrics["environment/failed_raised"] == 2.0


@pytest.mark.slow
def test_one_that_hangs_is_ended_in_time(tokenizer):
    started = time.monotonic()
    groups, metrics, _ = play(
        tokenizer, "Hostile", ["ab"], answers=("hang step", "well"), max_turns=2, timeout_s=2.0, workers=2
    )
    assert time.monotonic() - started < 40
    assert [group.reward_failed.tolist() for group in groups] == [[True, True], [False, False]]
    assert metrics["environment/failed_timeout"] == 2.0


@pytest.mark.slow
async def test_a_cancelled_trajectory_gives_its_place_back():
    config = EnvironmentConfig(name=f"{WORLDS}:Hostile", workers=1)

    async def hold(pool: EnvironmentPool, how: str) -> None:
        async with pool.session() as session:
            await session.reset(Prompt(0, 0, np.zeros(1, np.int32), "", how), 0)
            await session.step("a")

    with EnvironmentPool(config) as pool:
        hanging = asyncio.create_task(hold(pool, "hang step"))
        await asyncio.sleep(2.0)
        waiting = asyncio.create_task(hold(pool, "well"))
        hanging.cancel()
        await asyncio.wait_for(waiting, 30)
        # A worker that dies between two trajectories fails neither.
        async with pool.session() as session:
            await session.tools()
            pid = session._worker._process.pid
        os.kill(pid, signal.SIGKILL)
        await asyncio.wait_for(hold(pool, "well"), 30)
        with pytest.raises(EnvironmentFailed, match="no such thing"):
            await hold(pool, "raise step")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "says"),
    [
        (f"{WORLDS}:Ecco", "environment.name = .*did you mean 'Echo'"),
        (f"{WORLDS}:Broken", "ValueError: cannot be made"),
        ("tests.rollout.environments.nowhere:X", "cannot import tests.rollout.environments.nowhere"),
        ("types:SimpleNamespace", "environment.name = types:SimpleNamespace: has neither `tools` nor `step`; give it"),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused_before_a_run(name, says):
    problem = environment_problem(EnvironmentConfig(name=name), [], chat=True)
    assert re.search(says, problem)


@pytest.mark.slow
def test_one_that_can_be_made_has_no_problem():
    assert environment_problem(EnvironmentConfig(), [], chat=False) is None
    assert environment_problem(EnvironmentConfig(name=f"{WORLDS}:Table"), [], chat=True) is None
    assert "data.chat_template = true" in environment_problem(EnvironmentConfig(name=f"{WORLDS}:Table"), [], chat=False)
    assert environment_problem(EnvironmentConfig(name=f"{WORLDS}:Echo"), [], chat=True, by_turn=True) is None
    no_turns = environment_problem(EnvironmentConfig(name=f"{WORLDS}:Table"), [], chat=True, by_turn=True)
    assert "Table has no method `step`" in no_turns


@pytest.mark.slow
def test_the_one_in_the_documentation_can_be_made(tmp_path, monkeypatch):
    page = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()
    (tmp_path / "my_table.py").write_text(page.split("```python\n")[1].split("```")[0])
    (tmp_path / "prices.json").write_text('{"tea": 3.5}')
    monkeypatch.syspath_prepend(tmp_path)
    settings = {"file": str(tmp_path / "prices.json")}
    assert environment_problem(EnvironmentConfig(name="my_table:Table", settings=settings), [], chat=True) is None
