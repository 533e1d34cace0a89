"""kill -9 of every process that takes part in a turn, at every turn: no finished turn is sampled again or differs."""

import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from dppo_megatron.bank.audit import Turn
from tests.support.audit import audit
from tests.support.engine_watch import Watch, groups_of
from tests.support.faults import Proxy, Run, command_line, kill
from tests.support.runs import Engine, config_tree, descendants, run, start_engine, write_config

PROMPTS, SAMPLES, TURNS = 12, 4, 3
STAR = 14  # ends a turn, besides the end-of-sequence token, which the template does not write: then a branch begins
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}*{% else %}={% endif %}{% endfor %}"


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
    tree["environment"] = {
        "name": "tests.rollout.environments.worlds:Unscored",
        "settings": {"turns": TURNS},
        "workers": 2,
    }
    return tree


class Life(Run):
    """`dppo-megatron sample` in the background."""

    def __init__(self, tree: dict, directory: Path, prompts: int = PROMPTS):
        resumed = ("--resume",) if Path(tree["run"]["dir"]).exists() else ()
        options = ("--n", str(SAMPLES), "--prompts", str(prompts), *resumed)
        super().__init__(tree, directory, *options, command="sample")

    def kill(self, part: str) -> None:
        kill(next(p.pid for p in descendants(self.process) if part in command_line(p)))

    def kill_after_a_finished_turn(self) -> None:
        """Kill the orchestrator now, or if all first turns are in progress, as soon as one of them is in a journal."""

        def end() -> None:
            deadline = time.monotonic() + 60
            while not self.finished() and time.monotonic() < deadline:
                time.sleep(0.001)
            self.kill("dppo_megatron orchestrator")

        if self.finished():
            end()
        else:
            threading.Thread(target=end).start()

    def finished(self) -> list[Turn]:
        """Turns in the journals of groups that are not in the bank."""
        found = []
        for path in sorted((self.dir / "samples/open_turns").glob("*.jsonl")):
            numbers = Counter()
            try:
                lines = path.read_bytes().splitlines(keepends=True)
            except FileNotFoundError:  # its group was stored meanwhile
                continue
            for line in lines:
                if line.endswith(b"\n"):
                    fields = json.loads(line)
                    (trajectory,) = fields["trajectory"]
                    found.append((fields["position"], trajectory, numbers[trajectory]))
                    numbers[trajectory] += 1
        return found


def lives_of_orchestrators(watch: Watch, begin: Callable[[], Life], nth: int) -> Iterator[tuple[int, list[Turn], int]]:
    """One is killed at every turn: (turn, the turns that were finished then, how many had been asked for)."""
    for number in range(TURNS):
        life = begin()
        try:
            watch.at_reply = at(number, life.kill_after_a_finished_turn, nth)
            assert life.process.wait(200) == 1, life.output.read_text()
        finally:
            life.end()
        yield number, life.finished(), len(watch.asked)
    watch.at_reply = lambda turn: None


def check_cells(name: str, cells: list[tuple[int, list[Turn], int]], watch: Watch) -> None:
    """Check that no turn that was finished before the kill was requested again."""
    for number, finished, before in cells:
        again = set(finished) & set(watch.asked[before:])
        print(f"{name} | turn {number} | {len(finished)} turns finished | {len(again)} of them sampled again")
        assert finished
        assert not again


@contextmanager
def victims(task: Path, directory: Path) -> Iterator[list[Callable[[], Engine]]]:
    """Engines that start meanwhile, one to be killed at each turn."""
    with ThreadPoolExecutor(TURNS) as starting:
        begun = []
        for number in range(TURNS):
            (directory / str(number)).mkdir()
            begun.append(starting.submit(start_engine, task, directory / str(number)))
        try:
            yield [engine.result for engine in begun]
        finally:
            for engine in begun:
                engine.result().end()


@pytest.mark.slow
def test_no_finished_turn_is_lost_or_sampled_again(task, engine, tmp_path_factory, tmp_path):
    watch, cells, directory = Watch(), [], tmp_path / "run"
    with ExitStack() as stack:
        doomed = stack.enter_context(victims(task, tmp_path_factory.mktemp("victims")))
        undisturbed = tree_of(task, tmp_path / "undisturbed", [engine.url])
        run("sample", write_config(undisturbed, tmp_path / "u.yaml"), "--n", str(SAMPLES), "--prompts", str(PROMPTS))
        good = stack.enter_context(Proxy(engine.url, watch))
        # kill -9 of the orchestrator, and with it of the environments.
        cells += lives_of_orchestrators(watch, lambda: Life(tree_of(task, directory, [good.url]), tmp_path), nth=5)
        # kill -9 of an environment's process and of an engine at every turn, in a life that goes on.
        ended, urls = [], []
        for number, started in enumerate(doomed):
            pid = json.loads((started().directory / "services/engine-0.json").read_text())["pid"]
            before = Watch()
            before.asked, before.behind, before.returned = watch.asked, watch.behind, watch.returned

            def end(number: int = number, pid: int = pid) -> None:
                kill(pid)
                ended.append(number)

            before.at_request = at(number, end)
            urls.append(stack.enter_context(Proxy(started().url, before)).url)
        tree = tree_of(task, directory, [*urls, good.url])
        tree["environment"]["workers"] = 1  # so that the one there is plays the turn, by the first engine that is left
        life = Life(tree, tmp_path)
        stack.callback(life.end)
        killed, hit = Counter(), set()

        def worker(turn: Turn) -> None:
            if not killed[turn[2]] and turn[:2] not in hit:  # each dies once
                killed[turn[2]] += 1
                hit.add(turn[:2])
                life.kill("environments.worker")

        watch.at_reply = worker
        assert life.process.wait(300) == 0, life.output.read_text()
    check_cells("orchestrator", cells, watch)
    story = (directory / "samples/logs/orchestrator.log").read_text()
    for number in sorted(killed):
        print(f"environment | turn {number} | killed | its trajectory was replayed")
    assert sorted(killed) == list(range(TURNS))
    assert story.count("it is replayed") >= TURNS
    for number in sorted(ended):
        print(f"engine | turn {number} | killed | the turn in progress was sent to another")
    assert sorted(ended) == list(range(TURNS))
    assert story.count("sending a request again") >= TURNS
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


@pytest.mark.slow
def test_the_gateway_loses_no_finished_turn_and_samples_none_again(task, engine, tmp_path):
    """The gateway runs in the orchestrator's process. The agent is written with the published clients."""
    directory, prompts = tmp_path / "run", 4
    shutil.copytree(task / "random_model", tmp_path / "model")
    (tmp_path / "model/chat_template.jinja").write_text(TEMPLATE)
    watch = Watch()
    with Proxy(engine.url, watch) as proxy:
        tree = tree_of(task, directory, [proxy.url])
        tree["model"]["path"] = str(tmp_path / "model")
        tree["data"]["chat_template"] = True
        tree["environment"] = {"agent": "tests.rollout.gateway.published:converses", "workers": 2, "max_turn_tokens": 8}
        tree["rollout"]["stop_token_ids"] = [STAR]
        cells = list(lives_of_orchestrators(watch, lambda: Life(tree, tmp_path, prompts), nth=4))
        life = Life(tree, tmp_path, prompts)
        try:
            assert life.process.wait(200) == 0, life.output.read_text()
        finally:
            life.end()
    check_cells("gateway, in the orchestrator", cells, watch)
    stored = groups_of(directory)
    checked = audit(stored, watch.returned)
    print(checked)
    assert checked.problems == []
    assert not any(group.reward_failed.any() for group in stored)
    assert checked.counts["trajectories"] == prompts * SAMPLES
    assert checked.counts["turns"] == len(watch.returned) == TURNS * prompts * SAMPLES
    assert prompts * SAMPLES < checked.counts["branches"] < checked.counts["turns"]
    assert list((directory / "samples/open_turns").iterdir()) == []
