"""The text of the studies' task is right, and every machine makes the same task."""

import json
import random
from itertools import islice
from pathlib import Path

import pytest
from chains import CAREFULLY, LEVELS, Chain, careless, chains, make_task, right
from claims import CLAIMS, table
from transformers import AutoTokenizer

from dppo_megatron.lab.study.rows import StudyRow, read_rows
from dppo_megatron.rollout.rewards.registry import load_reward
from dppo_megatron.types import Prompt

STUDY = Path(__file__).parents[3] / "studies" / "chains"


def rows(directory: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("chains")
    make_task(directory, "easy", seed=3)
    return directory


def test_a_ten_is_forgotten_digit_by_digit():
    assert [right(17, "+", 5), careless(17, "+", 5)] == [22, 12]
    assert [right(22, "-", 8), careless(22, "-", 8)] == [14, 14]
    assert [right(96, "+", 29), careless(96, "+", 29)] == [25, 15]
    assert [right(3, "-", 5), careless(3, "-", 5)] == [98, 98]
    assert right(41, "+", 5) == careless(41, "+", 5) == 46


def test_the_text_is_right_where_it_is_careful_and_some_samples_of_every_level_are():
    generator = random.Random(1)
    for level in LEVELS.values():
        share = 0
        for chain in islice(chains(level, generator), 400):
            words = chain.worked_out(generator, level.forgotten).split()
            share += words[-2:] == chain.answer.split() and words[-3] == "answer"
            size = 7 + chain.places
            for step in (words[i : i + size] for i in range(0, len(words) - 3, size)):
                value, number, result = (int("".join(d)) for d in (step[1:3], step[4:-3], step[-2:]))
                assert result in (right(value, step[3], number), careless(value, step[3], number))
                assert step[0] != CAREFULLY or result == right(value, step[3], number)
        assert 0.1 < share / 400 < 0.4


def test_a_chain_is_written_a_token_a_digit():
    chain = Chain(7, (("+", 5), ("-", 9)), places=1)
    assert (chain.prompt, chain.answer) == ("0 7 + 5 - 9 =", "0 3")
    assert Chain(7, (("+", 5),), places=2).prompt == "0 7 + 0 5 ="


def test_a_seed_gives_the_same_task_and_its_parts_share_no_chain(task, tmp_path):
    make_task(tmp_path, "easy", seed=3)
    names = ("train", "heldout", "warmup")
    for name in names:
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (task / f"{name}.jsonl").read_bytes()
    assert (tmp_path / "random_model/model.safetensors").read_bytes() == (
        task / "random_model/model.safetensors"
    ).read_bytes()
    prompts = [row["prompt"] for name in names for row in rows(task, name)]
    assert len(set(prompts)) == len(prompts)


def test_the_tokenizer_and_the_grader_read_it(task):
    tokenizer = AutoTokenizer.from_pretrained(task / "random_model")
    reward = load_reward("regex", {"pattern": r"answer (\d \d)$"})
    for row in rows(task, "warmup")[:50]:
        ids = tokenizer.encode(row["answer"], add_special_tokens=False)
        assert len(ids) == len(row["answer"].split())
        text = tokenizer.decode(ids)
        assert text == row["answer"]
        for answer, value in ((row["answer"][-3:], 1.0), ("0 x", 0.0)):
            assert reward(Prompt(0, 0, None, row["prompt"], answer), text) == value


def test_a_verdict_is_that_of_its_interval():
    def row(method: str, seed: int, end: float) -> StudyRow:
        curve = ((0, 0.3), (60, end))
        return StudyRow(method, "stale", seed, "", "done", 60, 0.3, end, end, False, None, None, 1.0, "", curve)

    told = []
    for ours, theirs in ((0.9, 0.5), (0.1, 0.5), (0.5, 0.5)):
        rows = [row("dppo_binary_tv", seed, ours + seed / 100) for seed in range(4)]
        rows += [row("pg_is", seed, theirs) for seed in range(3)]
        told.append(list(table(rows))[2])
    student = "[+0.385, +0.435]"
    difference = f"+0.410 [+0.400, +0.420] | {student} | 0, 0 | +0.410 {student} (3) | 0.0034"
    assert told[0].endswith(f"| `dppo_binary_tv` over `pg_is` | 3 | {difference} | confirmed |")
    assert told[1].endswith("| refuted |")
    assert told[2].endswith("(3) | 1 | not resolved at this scale |")


def test_survivors_are_the_seeds_of_which_no_run_collapsed():
    def row(method: str, seed: int, end: float, collapsed: bool) -> StudyRow:
        curve = ((0, 0.3), (60, end))
        return StudyRow(method, "stale", seed, "", "done", 60, 0.3, end, end, collapsed, None, None, 1.0, "", curve)

    rows = [row("dppo_binary_tv", seed, 0.9, False) for seed in range(3)]
    rows += [row("pg_is", seed, end, end < 0.3) for seed, end in enumerate((0.7, 0.0, 0.8))]
    assert " | 0, 1 | +0.150 (2) | " in list(table(rows))[2]


def test_the_documented_verdicts_are_those_of_the_stored_rows():
    results = STUDY / "results"
    lines = list(table(read_rows(results / "methods") + read_rows(results / "ablations")))
    assert len(lines) == 2 + sum(map(len, CLAIMS.values()))
    documented = (STUDY.parents[1] / "docs" / "study.md").read_text()
    assert documented.split("<!-- claims -->\n")[1].split("<!-- claims end -->\n")[0].splitlines() == lines
