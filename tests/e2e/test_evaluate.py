"""`dppo-megatron eval` on a real server: killed half-way, continued, and on a checkpoint of a run."""

import json
import re

import pytest

from dppo_megatron.bank import BankReader
from tests.support.runs import config_tree, run, start, wait_until, write_config

pytestmark = pytest.mark.slow


@pytest.fixture
def configured(task, engine, tmp_path):
    """Makes a config with 64 answers to each sum, one after the other, by top-p sampling."""

    def make(name: str) -> str:
        tree = config_tree(task, tmp_path / name, urls=(engine.url,))
        tree["rollout"]["max_concurrent_groups"] = 1
        tree["eval"] = {"sets": {"sums": {"path": tree["data"]["eval"], "n": 64, "temperature": 1.0, "top_p": 0.95}}}
        return write_config(tree, tmp_path / f"{name}.yaml")

    return make


def reported(result) -> list[str]:
    return [re.sub(r"^.*?: ", "", line) for line in result.stdout.splitlines() if re.search(r" prompts$| right", line)]


def test_an_evaluation_killed_half_way_resumes_under_its_settings_and_reports_the_same(configured, engine, tmp_path):
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
    changed = run("eval", config, "--url", engine.url, "--resume", "--set", "eval.sets.sums.n=8", check=False)
    assert changed.returncode == 2
    assert "eval.sets.sums.n = 8: the run was started with 64" in changed.stderr
    again = run("eval", config, "--url", engine.url, "--resume")
    assert reported(again) == reported(whole)
    assert len(reported(again)) == 2
    records = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [json.dumps(record) for record in records[: len(kept) - 1]] == kept[:-1]
    assert sorted(record["position"] for record in records) == list(range(16))
    assert all(len(record["samples"]) == 64 for record in records)


def test_a_bank_is_filled_without_a_trainer_and_prompts_are_kept_by_it(task, engine, tmp_path):
    """Killed half-way and continued; the answers that count are all there, once."""
    tree = config_tree(task, tmp_path / "run", urls=(engine.url,))
    tree["rollout"]["max_concurrent_groups"] = 1
    config = write_config(tree, tmp_path / "c.yaml")
    arguments = ("sample", config, "--n", "16", "--prompts", "200")
    process = start(*arguments, output=tmp_path / "out")
    bank = tmp_path / "run/samples/bank"
    wait_until(lambda: len(list(bank.glob("*.jsonl"))) > 2, "groups", process, tmp_path / "out")
    process.kill()
    process.wait()
    refused = run(*arguments, check=False)
    assert refused.returncode == 2
    assert "already contains a run; pass --resume" in refused.stderr
    done = run(*arguments, "--resume")
    assert "200 prompts, 3200 graded answers" in done.stdout
    reader = BankReader(bank)
    entries = reader.entries(0, reader.refresh())
    assert sorted(entry.position for entry in entries) == list(range(200))
    assert {entry.max_version for entry in entries} == {0}
    out = tmp_path / "some.jsonl"
    shown = run("data", "filter", "--bank", bank, "--pass-rate", "0:0.9", "--pass-reward", "0.5", out).stdout
    rates = [json.loads(line)["pass_rate"] for line in out.read_text().splitlines()]
    assert 0 < len(rates) <= 200
    assert max(rates) <= 0.9
    assert " not sampled" in shown
