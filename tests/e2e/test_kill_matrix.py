"""kill -9 of every process that takes part in a turn, at every turn: no finished turn is sampled again or differs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from dppo_megatron.bank.audit import Turn, audit
from tests.support.engine_watch import Watch, groups_of
from tests.support.faults import Proxy, command_line, kill
from tests.support.runs import Engine, config_tree, descendants, end_session, run, start, start_engine, write_config

PROMPTS, SAMPLES, TURNS = 12, 4, 3


def at(number: int, act: Callable[[], None], nth: int = 1) -> Callable[[Turn], None]:
    """Acts at the nth turn of this number."""
    seen = []

    def told(turn: Turn) -> None:
        if turn[2] == number:
            seen.append(turn)
            if len(seen) == nth:
                act()

    return told


def tree_of(task: Path, directory: Path, urls: list[str]) -> dict:
    tree = config_tree(task, directory, urls=tuple(urls))
    tree["rollout"] |= {"max_response_tokens": 40, "stop_token_ids": [2, 3, 4, 5, 6], "max_concurrent_groups": 2}
    tree["environment"] = {"name": "tests.environments.worlds:Unscored", "settings": {"turns": TURNS}, "workers": 2}
    return tree


class Life:
    """`dppo-megatron sample` in the background."""

    def __init__(self, tree: dict, directory: Path):
        self.directory = Path(tree["run"]["dir"])
        self.output = directory / "out"
        resumed = ("--resume",) if self.directory.exists() else ()
        config = write_config(tree, directory / "c.yaml")
        arguments = ("sample", config, "--n", str(SAMPLES), "--prompts", str(PROMPTS), *resumed)
        self.process = start(*arguments, output=self.output)

    def pids(self, part: str) -> list[int]:
        return [p.pid for p in descendants(self.process) if part in command_line(p)]

    def kill(self, part: str) -> None:
        kill(self.pids(part)[0])

    def end(self) -> None:
        if self.process.poll() is None:
            end_session(self.process)

    def finished(self) -> list[Turn]:
        """Turns that the journals hold, of groups that are not in the bank."""
        found = []
        for path in sorted((self.directory / "samples/open_turns").glob("*.jsonl")):
            numbers = Counter()
            for line in path.read_bytes().splitlines(keepends=True):
                if line.endswith(b"\n"):
                    fields = json.loads(line)
                    (trajectory,) = fields["trajectory"]
                    found.append((fields["position"], trajectory, numbers[trajectory]))
                    numbers[trajectory] += 1
        return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_finished_turn_is_lost_or_sampled_again(task, engine, tmp_path_factory, tmp_path):
    undisturbed = tree_of(task, tmp_path / "undisturbed", [engine.url])
    run("sample", write_config(undisturbed, tmp_path / "u.yaml"), "--n", str(SAMPLES), "--prompts", str(PROMPTS))
    victim: Engine = start_engine(task, tmp_path_factory.mktemp("victim"))
    watch, doomed, cells = Watch(), Watch(), []
    doomed.asked, doomed.returned = watch.asked, watch.returned
    try:
        with Proxy(engine.url, watch) as good, Proxy(victim.url, doomed) as bad:
            directory = tmp_path / "run"
            # kill -9 of the orchestrator, and with it of the environments.
            for number in range(TURNS):
                life = Life(tree_of(task, directory, [good.url]), tmp_path)
                watch.at_reply = at(number, lambda life=life: life.kill("dppo_megatron orchestrator"), nth=5)
                assert life.process.wait(200) == 1, life.output.read_text()
                finished, before = life.finished(), len(watch.asked)
                cells.append((f"orchestrator, turn {number}", finished, before))
            # kill -9 of an environment's process, and of an engine; each once in a life that goes on.
            tree = tree_of(task, directory, [bad.url, good.url])
            tree["environment"]["workers"] = 1  # so that the one there is plays the turn
            life = Life(tree, tmp_path)
            service = json.loads((victim.directory / "services/engine-0.json").read_text())
            doomed.at_request = at(1, lambda: kill(service["pid"]))
            killed, hit = Counter(), set()

            def worker(turn: Turn) -> None:
                if not killed[turn[2]] and turn[:2] not in hit:  # each dies once
                    killed[turn[2]] += 1
                    hit.add(turn[:2])
                    life.kill("environments.worker")

            watch.at_reply = worker
            assert life.process.wait(300) == 0, life.output.read_text()
    finally:
        life.end()
        victim.end()
    assert not psutil.pid_exists(service["pid"]) or victim.process.poll() is not None
    for name, finished, before in cells:
        again = set(finished) & set(watch.asked[before:])
        print(f"{name}: {len(finished)} turns finished, {len(again)} of them sampled again")
        assert finished
        assert not again
    story = (directory / "samples/logs/orchestrator.log").read_text()
    print(f"environment: killed at turns {sorted(killed)}, replayed {story.count('it is replayed')} times")
    assert sorted(killed) == list(range(TURNS))
    assert story.count("it is replayed") >= TURNS
    print(f"engine: killed at turn 1; {story.count('sending a request again')} requests were sent to the other")
    assert "sending a request again" in story
    # A turn in progress may be asked for again, with the same seed; a finished one never is.
    stored = groups_of(directory)
    checked = audit(stored, watch.returned)
    print(checked)
    assert checked.problems == []
    assert checked.counts["trajectories"] == PROMPTS * SAMPLES
    assert list((directory / "samples/open_turns").iterdir()) == []
    for group, reference in zip(stored, groups_of(tmp_path / "undisturbed"), strict=True):
        assert not group.reward_failed.any()
        assert np.array_equal(group.rewards, reference.rewards)
        for one, other in zip(group.rollouts, reference.rollouts, strict=True):
            assert np.array_equal(one.token_ids, other.token_ids)
            assert np.array_equal(one.spans, other.spans)
            assert np.array_equal(one.rollout_logprob, other.rollout_logprob)
