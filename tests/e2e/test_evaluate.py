"""`dppo-megatron eval` on a real server: killed half-way, continued, and on a checkpoint of a run."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.runs import config_tree, run, start, wait_until, write_config

pytestmark = pytest.mark.slow


@pytest.fixture
def configured(task, engine, tmp_path):
    """Makes a config whose sums are answered 64 times each, one after the other, by top-p sampling."""

    def make(name: str) -> str:
        tree = config_tree(task, tmp_path / name, urls=(engine.url,))
        tree["rollout"]["max_concurrent_groups"] = 1
        tree["eval"] = {
            "sets": {"sums": {"path": tree["data"]["eval"], "n": 64, "temperature": 1.0, "top_p": 0.95}},
        }
        return write_config(tree, tmp_path / f"{name}.yaml")

    return make


def reported(result) -> list[str]:
    return [re.sub(r"^.*?: ", "", line) for line in result.stdout.splitlines() if " prompts" in line]


def test_an_evaluation_killed_half_way_goes_on_and_reports_the_same(configured, engine, tmp_path):
    whole = run("eval", configured("whole"), "--url", engine.url)
    config = configured("killed")
    process = start("eval", config, "--url", engine.url, output=tmp_path / "out")
    answers = tmp_path / "killed/eval/running-1/answers/sums/v000000.jsonl"
    wait_until(
        lambda: answers.exists() and len(answers.read_text().splitlines()) >= 3, "answers", process, tmp_path / "out"
    )
    process.kill()
    process.wait()
    kept = answers.read_text().splitlines()
    assert 3 <= len(kept) < 16
    again = run("eval", config, "--url", engine.url, "--resume")
    assert reported(again) == reported(whole)
    assert len(reported(again)) == 2
    records = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [json.dumps(record) for record in records[: len(kept) - 1]] == kept[:-1]
    assert sorted(record["position"] for record in records) == list(range(16))
    assert all(len(record["samples"]) == 64 for record in records)


def test_other_settings_are_no_resume(configured, engine):
    config = configured("other")
    run("eval", config, "--url", engine.url)
    changed = run("eval", config, "--url", engine.url, "--resume", "--set", "eval.sets.sums.n=8", check=False)
    assert changed.returncode == 2
    assert "eval.sets.sums.n = 8: the run was started with 64" in changed.stderr
