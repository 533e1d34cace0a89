"""A run that an earlier version of this program wrote is read, reported and continued by this one.

tests/data/run_before was written when rollout/ was still a package: two of four steps on a bank.
"""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from dppo_megatron.bank import BankReader
from dppo_megatron.run.checks import check_run_dir, load_config
from tests.support.runs import records, run, steps_done

STORED = Path(__file__).parents[1] / "data" / "run_before"
STEPS = 4
BANK_SHA256 = "f6557394a0b6205dfc80b084ee5da68ba547aa8f3c871bcfcc6e44cbabdf986e"


@pytest.fixture
def before(tmp_path, monkeypatch) -> Path:
    """A copy, which is the working directory: the stored paths are relative."""
    directory = Path(shutil.copytree(STORED, tmp_path / "before"))
    monkeypatch.chdir(directory)
    return directory


def test_its_bank_reads_bit_for_bit(before):
    reader = BankReader(before / "bank")
    digest = hashlib.sha256()
    for entry in reader.entries(0, reader.refresh()):
        group = reader.read(entry)
        digest.update(group.prompt.token_ids.tobytes() + group.rewards.tobytes())
        for r in group.rollouts:
            for array in (r.token_ids, r.rollout_logprob, r.versions, r.topk_ids, r.rollout_topk_logprob):
                digest.update(array.tobytes())
    assert digest.hexdigest() == BANK_SHA256


def test_it_is_reported(before):
    run("report", "run")
    report = (before / "run" / "report" / "report.md").read_text()
    assert "dppo_topk_tv" in report
    assert (before / "run" / "report" / "curves.png").stat().st_size > 10_000


@pytest.mark.slow
def test_it_is_continued_as_the_earlier_version_would_have(before):
    run("train", "config.yaml", "--resume")
    assert steps_done(before / "run") == list(range(1, STEPS + 1))
    expected = [json.loads(line) for line in (before / "expected.jsonl").read_text().splitlines()]
    continued = [r for r in records(before / "run") if r["step"] > 2 and "time/step_s" in r]
    for got, wanted in zip(continued, expected, strict=True):
        for name, value in wanted.items():
            assert got[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("anchor", ["old", "recomputed"])
def test_either_name_of_the_old_policy_continues_it(before, anchor):
    config = load_config("config.yaml", [f"objective.settings.anchor={anchor}"])
    check_run_dir(config, "config.yaml", resume=True)
