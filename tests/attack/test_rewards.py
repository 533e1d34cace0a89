"""A reward may do anything at all: it fails only its own sample, and never takes longer than its time-out."""

import asyncio
import re
import sys
import time

import numpy as np
import pytest

from dppo_megatron.config.schema import RewardConfig
from dppo_megatron.rollout.rewards import RewardError, RewardPool, build_rewards, import_problem
from dppo_megatron.types import Prompt
from tests.attack import cases, generator
from tests.attack.hostile_rewards import HARMS, RAISES, RETURNS, exactly, harmless

PROMPT = Prompt(0, 0, np.zeros(1, np.int32), "", "1", {})
NAMED = [*RAISES, "recursion", "chain"]


def pool(kind: str, **settings) -> RewardPool:
    return RewardPool(RewardConfig(name=f"tests.attack.hostile_rewards:{kind}_reward", **settings))


def check(names: list[str], rewards: np.ndarray, failed: np.ndarray) -> None:
    """Every sample that is not hostile has its reward; every hostile one has none."""
    wanted = {name: exactly.get(name, 1.0) for name in names}
    spoils = {name for name in (*NAMED, *RETURNS, *HARMS) if name not in exactly and name not in harmless}
    for name, reward, lost in zip(names, rewards.tolist(), failed.tolist(), strict=True):
        expected = (0.0, True) if name in spoils else (float(np.float32(wanted[name])), False)
        assert (reward, lost) == expected, name


@pytest.mark.parametrize("kind", ["sync", "async", "inline"])
def test_a_hostile_exception_or_return_value_fails_only_its_own_sample(kind, caplog):
    names = [name for hostile in (*NAMED, *RETURNS) for name in ("ok", hostile)]
    if kind != "sync":  # it was awaited already, or runs in the loop of the caller and cannot wait
        names.remove("awaitable")
    with pool(kind, workers=2, timeout_s=25.0) as rewards:  # one of them imports torch first
        started = time.monotonic()
        check(names, *asyncio.run(rewards.score(PROMPT, names)))
        assert time.monotonic() - started < 120  # each time-out would cost 25 s, and appear among the reasons below
    (total,) = re.findall(r"rewards of (\d+) of (\d+) samples failed: (.*)", caplog.text)[-1:]
    assert (int(total[0]), int(total[1])) == (sum(n != "ok" and n not in exactly for n in names), len(names))
    assert re.fullmatch(r"\d+ raised, \d+ not_finite", total[2])
    assert max(len(record.getMessage()) for record in caplog.records) < 4096
    caplog.text.encode()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(cases(2)))
def test_a_reward_that_harms_its_process_fails_only_its_own_sample(seed):
    """All of them among samples that are not hostile, in random order; each takes at most its time-out."""
    names = [*HARMS, *["ok"] * len(HARMS)]
    generator("harms", seed).shuffle(names)
    with pool("sync", workers=4, timeout_s=8.0) as rewards:
        check(names, *asyncio.run(rewards.score(PROMPT, names)))
        check(["ok"] * 8, *asyncio.run(rewards.score(PROMPT, ["ok"] * 8)))


def test_streams_that_one_sample_closed_are_open_for_the_next():
    names = ["close stdout", "print", "close stdout", "ok"]
    with pool("sync", workers=1) as rewards:
        check(names, *asyncio.run(rewards.score(PROMPT, names)))


@pytest.mark.parametrize("name", ["rubbish", "one byte", "much rubbish", "not JSON"])
def test_rubbish_on_the_channel_is_no_wait(name, caplog):
    with pool("sync", workers=1, timeout_s=60.0) as rewards:
        asyncio.run(rewards.score(PROMPT, ["ok"]))
        started = time.monotonic()
        check([name, "ok"], *asyncio.run(rewards.score(PROMPT, [name, "ok"])))
        assert time.monotonic() - started < 20
    assert "(died): the verifier wrote to the result channel" in caplog.text


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise BaseException('x' * 10**6)", "BaseException: xxx"),
        ("class reward:\n    def __init__(self):\n        raise SystemExit(3)", r"reward\(\) failed: SystemExit: 3"),
        ("def __getattr__(name):\n    raise ValueError(name)", "ValueError"),
        ("raise ValueError('\\ud800')", "ValueError"),
        ("1 +", "SyntaxError"),
        ("def f(): return f()\nf()", "RecursionError"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_clear_error(tmp_path, monkeypatch, body, why):
    name = f"hostile_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(body + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RewardError, match=why) as raised:
        build_rewards(RewardConfig(name=f"{name}:reward"))
    sys.modules.pop(name, None)
    assert f"reward.name = {name}:reward" in str(raised.value)
    assert len(str(raised.value).encode()) < 4096


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("import os; os._exit(3)", r"ended \(exit code 3\)"),
        ("import os; os.abort()", r"ended \(killed by SIGABRT\)"),
        ("import os\nfor d in range(3, 4096):\n    try: os.write(d, b'rubbish')\n    except OSError: pass", "rubbish"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("def reward(prompt, response_text): return 1.0", None),
    ],
)
def test_a_module_that_ends_its_process_is_found_before_a_run(tmp_path, monkeypatch, body, why):
    name = f"ending_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(body + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    problem = import_problem(RewardConfig(name=f"{name}:reward"))
    assert (problem is None) if why is None else re.search(rf"reward\.name = {name}:reward: .*{why}", problem)
