"""With `engine.exact` a run with `engine.draft_tokens` has the bits of one without, also if killed and resumed.

On two ranks: for one, tests/rollout/engines/test_vllm_drafts.py compares the samples, and tests/lab/certify the
log-probs.
"""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from dppo_megatron.bank import BankReader
from tests.support import runs

pytestmark = pytest.mark.engines


def config_of(task: Path, directory: Path, draft_tokens: int) -> Path:
    rows = directory.parent / "rows.jsonl"
    rows.write_text("".join((task / "train.jsonl").read_text().splitlines(keepends=True)[: 2 * runs.GROUPS]))
    tree = runs.config_tree(task, directory)
    tree["data"]["train"] = str(rows)  # two epochs
    tree["rollout"] |= {"max_response_tokens": 24, "temperature": 0.2, "topk_logprobs": 4}
    tree["engine"] |= {"exact": True, "draft_tokens": draft_tokens, "draft_batch": 64}
    return runs.write_config(tree, directory.parent / f"{directory.name}.yaml")


def stored(directory: Path) -> dict[int, list]:
    """Return the columns of all samples, by prompt position."""
    reader = BankReader(directory / "bank")
    groups = [reader.read(entry) for entry in reader.entries(0, reader.refresh())]
    return {g.prompt.position: [(r.token_ids, *r.columns.values()) for r in g.rollouts] for g in groups}


def test_a_run_with_drafts_that_is_killed_has_the_bits_of_one_without(task, tmp_path):
    without, drafted = tmp_path / "without", tmp_path / "drafted"
    runs.run("train", config_of(task, without, 0))
    config = config_of(task, drafted, 4)
    process = runs.start("train", config, output=tmp_path / "out")
    runs.wait_until(lambda: len(runs.steps_done(drafted)) >= runs.STEPS // 2, "two steps", process, tmp_path / "out")
    for member in [*runs.descendants(process), process]:
        os.kill(member.pid, signal.SIGKILL)
    process.wait()
    runs.run("train", config, "--resume")

    expected, found = stored(without), stored(drafted)
    assert len(expected) == runs.STEPS * runs.GROUPS == len(found)
    for position, samples in expected.items():
        for sample, same in zip(samples, found[position], strict=True):
            for column, other in zip(sample, same, strict=True):
                np.testing.assert_array_equal(column, other)
    assert runs.weights_digest(without) == runs.weights_digest(drafted)
    assert {record["mismatch/kl"] for record in runs.records(drafted) if "mismatch/kl" in record} == {0}
    accepted = [r["drafts/accepted_share"] for r in runs.records(drafted) if "drafts/accepted_share" in r]
    assert max(accepted) > 0
    assert not any("drafts/accepted_share" in record for record in runs.records(without))
