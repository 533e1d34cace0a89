import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from dppo_megatron.common.retry import wait_until
from dppo_megatron.config.schema import RewardConfig
from dppo_megatron.rollout.rewards import RewardPool
from tests.support.speed import copying_s


def score(pool, prompt, *texts):
    rewards, failed = asyncio.run(pool.score(prompt, texts))
    assert rewards.dtype == np.float32
    assert failed.dtype == np.bool_
    return rewards.tolist(), failed.tolist()


def make_pool(name="tests.rollout.rewards.strange_rewards:strange", timeout_s=5.0, workers=1):
    return RewardPool(RewardConfig(name=name, timeout_s=timeout_s, workers=workers))


def logged_failures(caplog) -> dict[str, int]:
    """Failed samples by reason; the pool logs five of each."""
    return dict(Counter(re.findall(r"reward of prompt row \d+ failed \((\w+)\)", caplog.text)))


def test_verifiers_share_the_cpus(prompt, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    with make_pool(workers=2) as pool:
        assert score(pool, prompt("1"), "threads") == ([3.0], [False])


def test_hanging_verifiers_are_replaced(prompt, caplog):
    with make_pool(timeout_s=0.5, workers=2) as pool:
        start = time.monotonic()
        rewards, failed = score(pool, prompt("1"), "hang", "ok", "spin", "ok", "hang", "ok")
        assert rewards == [0, 1, 0, 1, 0, 1]
        assert failed == [True, False, True, False, True, False]
        assert logged_failures(caplog) == {"timeout": 3}
        assert pool.last_failure == "timeout: waited 0.5 s (reward.timeout_s) for the reward"
        assert time.monotonic() - start < 30
        assert score(pool, prompt("1"), "ok") == ([1.0], [False])


@pytest.mark.parametrize("size", [2, 30_000], ids=["sent at once", "more than a pipe holds"])
def test_a_worker_killed_while_idle_is_replaced(prompt, size, caplog):
    with make_pool() as pool:
        (pid,), _ = score(pool, prompt("1"), "pid")
        assert int(pid) != os.getpid()
        os.kill(int(pid), signal.SIGKILL)
        texts = ["x" * size] * 4
        assert asyncio.run(asyncio.wait_for(pool.score(prompt("1"), texts), 20))[0].tolist() == [1.0] * 4
        assert logged_failures(caplog) == {}


def test_a_class_is_one_object_per_process(prompt):
    with make_pool("tests.rollout.rewards.strange_rewards:Counting") as pool:
        assert score(pool, prompt("1"), "a", "b", "c") == ([1.0, 2.0, 3.0], [False] * 3)


def test_samples_of_an_async_reward_share_its_client(prompt):
    with make_pool("tests.rollout.rewards.strange_rewards:SharedClient") as pool:
        assert pool.check_answers([("", "1")]) == [None]
        assert score(pool, prompt("1"), "a", "b", "c") == ([1.0, 1.0, 1.0], [False] * 3)


def test_the_check_at_the_start_calls_a_reward_twice(prompt):
    with make_pool("tests.rollout.rewards.strange_rewards:second_call_fails", workers=2) as pool:
        ((_, failure),) = pool.try_once([prompt("1")])
        assert "ZeroDivisionError" in failure.detail


@pytest.mark.slow
def test_importing_does_not_count_against_the_timeout(prompt):
    with make_pool("tests.rollout.rewards.slow_to_import:one", timeout_s=0.75) as pool:
        assert score(pool, prompt("1"), "a", "b") == ([1.0, 1.0], [False, False])


def test_a_thousand_arithmetic_samples_are_cheap(prompt):
    async def seconds(pool):
        start = time.process_time()
        for _ in range(64):
            await pool.score(prompt("42"), ["42", " 41"] * 8)
        return time.process_time() - start

    with make_pool("arithmetic") as pool:
        assert min(asyncio.run(seconds(pool)) for _ in range(5)) < 2 * copying_s()


def test_a_coroutine_that_is_only_tested_for_truth_is_no_number(prompt, caplog):
    with make_pool() as pool:
        assert score(pool, prompt("1"), "coroutine", "fine", "coroutine") == ([0, 1, 0], [True, False, True])
    assert "coroutine 'judge' was never awaited; call it in an async function" in caplog.text
    assert logged_failures(caplog) == {"raised": 2}


def test_calls_begin_in_the_directory_of_the_run(prompt):
    with make_pool(workers=1) as pool:
        assert score(pool, prompt(os.getcwd()), "where", "enter", "where") == ([1, 1, 1], [False] * 3)


def test_a_killed_parent_leaves_no_worker():
    program = """
        import asyncio, os, signal, sys
        import numpy as np
        from dppo_megatron.config.schema import RewardConfig
        from dppo_megatron.rollout.rewards import RewardPool
        from dppo_megatron.types import Prompt

        async def main():
            pool = RewardPool(RewardConfig(name="tests.rollout.rewards.strange_rewards:strange", workers=1))
            prompt = Prompt(0, 0, np.zeros(1, np.int32), "", "", {})
            pids, _ = await pool.score(prompt, ["pid"])
            print(int(pids[0]), flush=True)
            asyncio.create_task(pool.score(prompt, ["spin"]))
            await asyncio.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)

        if __name__ == "__main__":
            asyncio.run(main())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True)
    worker = int(done.stdout)
    assert wait_until(lambda: not _runs(worker), 10, 0.05), "the worker outlived its parent"


def test_a_worker_that_ends_leaves_nothing_that_it_started(prompt, tmp_path):
    with make_pool() as pool:
        assert score(pool, prompt(str(tmp_path / "pid")), "leave a process") == ([0], [True])
    left = int((tmp_path / "pid").read_text())
    assert wait_until(lambda: not _runs(left), 10, 0.05), "it runs on, and nobody knows of it"


def test_a_group_reward_with_a_wrong_number_of_values_fails_its_group(prompt, caplog):
    with make_pool("tests.rollout.rewards.strange_rewards:WrongCount") as pool:
        assert score(pool, prompt(""), "a", "b") == ([0, 0], [True, True])
    assert "it returned 3 values for 2 responses" in caplog.text


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("math", ["\\frac12", "12", None]),
        ("dapo", [None, "12", None]),
        ("gsm8k", ["\\frac12", None, None]),
        ("arithmetic", ["so \\boxed{\\frac12}", "Answer: $12$", "no idea"]),
        ("tests.rollout.rewards.strange_rewards:strange", None),
    ],
)
def test_final_answers_are_those_that_graders_compare(prompt, name, expected):
    texts = ["so \\boxed{\\frac12}", "Answer: $12$", "no idea"]
    with make_pool(name) as pool:
        assert asyncio.run(pool.final_answers(prompt("1"), texts)) == expected
