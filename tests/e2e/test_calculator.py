"""The example with turns learns: only the policy's tokens are trained on, and the reward reaches every turn."""

import subprocess
import sys
from pathlib import Path

import pytest

from dppo_megatron.bank import BankReader
from tests.support.audit import audit
from tests.support.runs import end_session, environment, records

SCRIPT = Path(__file__).parents[2] / "examples" / "calculator" / "run.py"
STEPS = 5


@pytest.mark.slow
def test_a_policy_that_guesses_learns_to_ask_the_calculator(tmp_path):
    changes = ["--set", f"train.steps={STEPS}"]
    shorter = ("train.steps=200", "rollout.prompts_per_step=128", "optimizer.decay=constant")
    for change in (*shorter, "parallel.world_size=1", "parallel.tensor=1"):
        changes += ["--warmup-set", change]
    output = tmp_path / "output"
    with output.open("w") as file:
        command = [sys.executable, str(SCRIPT), *changes]
        process = subprocess.Popen(
            command, stdout=file, stderr=file, cwd=tmp_path, env=environment(), start_new_session=True
        )
        try:
            process.wait(500)
        finally:
            end_session(process)
    run = tmp_path / "runs" / "calculator" / "dppo"
    assert (run / "metrics.jsonl").exists(), output.read_text()
    check_learned(run, output.read_text())


def check_learned(run: Path, said: str) -> None:
    steps = [r for r in records(run) if "rollout/reward_mean" in r]
    shares = [r["rollout/reward_mean"] for r in steps]
    assert len(shares) == STEPS, said
    assert shares[-1] > shares[0] + 0.3, shares
    # A mask off by a token, and turns without credit, learn nearly as much of this task.
    assert max(r["mismatch/max_abs_logprob_difference"] for r in steps) < 1e-4
    assert [r["advantage/zero_share"] for r in steps] == [0] * STEPS
    reader = BankReader(run / "bank")
    found = audit(reader.read(entry) for entry in reader.entries(0, reader.refresh()))
    assert found.problems == []
    assert found.counts["turns"] > found.counts["trajectories"]
    assert found.counts["environment tokens"] > 0
    assert found.counts["tokens that carry loss"] == found.counts["policy tokens"]
