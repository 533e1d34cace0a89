"""`dppo-megatron audit` counts the contents of a bank and names every contradiction in it."""

from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from dppo_megatron.bank import BankWriter
from dppo_megatron.bank.audit import audit_bank
from dppo_megatron.cli import app
from dppo_megatron.types import INHERITED, POLICY, RolloutGroup
from tests.support.bank import as_killed, files, make_group
from tests.support.corruptions import FROM_THE_BANK_ALONE, write
from tests.support.turns import with_turns

GROUPS = 4


def run(path) -> tuple[int, list[str]]:
    result = CliRunner().invoke(app, ["audit", str(path)])
    return result.exit_code, result.stdout.splitlines()


def turns_of_a_policy(position: int) -> RolloutGroup:
    """Every sampled token stands in its top-K list."""
    group = with_turns(make_group(position, topk=4))
    rows = []
    for rollout in group.rollouts:
        ids, logprobs = rollout.topk_ids.copy(), rollout.rollout_topk_logprob.copy()
        sampled, spans = rollout.token_ids, rollout.spans
        if spans is not None:
            sampled = sampled[np.repeat(spans[:, 0] == POLICY, spans[:, 1])]
            if spans[0, 0] == INHERITED:  # its turn is the trajectory's third, not another second one
                spans = np.concatenate([spans[:-1], [[POLICY, spans[-1, 1], 2]]]).astype(np.int32)
        ids[:, 0], logprobs[:, 0] = sampled, rollout.rollout_logprob
        ids[:, 1:] += 1000
        rows.append(replace(rollout, topk_ids=ids, rollout_topk_logprob=logprobs, spans=spans))
    return replace(group, rollouts=tuple(rows))


@pytest.fixture(scope="module")
def groups() -> list[RolloutGroup]:
    return [turns_of_a_policy(position) for position in range(GROUPS)]


def test_a_whole_bank_is_counted(groups, tmp_path):
    with BankWriter(tmp_path / "bank", 2, fsync=False) as bank:
        for group in groups:
            bank.append(group)
    code, (line,) = run(tmp_path / "bank")
    branches = [r for g in groups for r in g.rollouts]
    tokens = sum(len(r.versions) for r in branches)
    assert code == 0
    assert line.startswith(
        f"{GROUPS} groups, {4 * GROUPS} trajectories, 0 failed trajectories, {len(branches)} branches"
    )
    assert f" {tokens} policy tokens" in line
    assert line.endswith(f" inherited tokens, {tokens} tokens that carry loss; 0 problems")
    assert [(done, total) for done, total, _ in audit_bank(tmp_path / "bank")] == [
        (n, GROUPS) for n in range(GROUPS + 1)
    ]


@pytest.mark.parametrize("damage", FROM_THE_BANK_ALONE, ids=lambda damage: damage.__name__)
def test_planted_damage_is_named(groups, tmp_path, damage):
    where = write(tmp_path / "bank", groups, damage)
    code, (*problems, counts) = run(tmp_path / "bank")
    assert code == 1
    assert all(problem.startswith(where) for problem in problems), problems
    assert any(problem.endswith(f": {FROM_THE_BANK_ALONE[damage]}") for problem in problems), problems
    assert counts.endswith(f"; {len(problems)} problems")


def test_single_turns_and_runs_that_were_killed(tmp_path):
    single = [make_group(position) for position in range(6)]  # position 0 and 5: a failed verifier
    tokens = sum(len(r.token_ids) for g in single for r in g.rollouts)
    lost = sum(len(g.rollouts[0].token_ids) for g in single if g.reward_failed[0])
    expected = (
        f"6 groups, 24 trajectories, 2 failed trajectories, 24 branches, 24 turns, {tokens} policy tokens, 0 "
        f"environment tokens, 0 inherited tokens, {tokens - lost} tokens that carry loss; 0 problems"
    )
    with BankWriter(tmp_path / "run/bank", 3, fsync=False) as bank:
        for group in single:
            bank.append(group)
    as_killed(tmp_path / "run/bank")
    with files(tmp_path / "run/bank", 1)[1].open("ab") as index:
        index.write(b'{"kind":"group","position":6,')  # a line that was being written
    for path in (tmp_path / "run", tmp_path / "run/bank"):
        assert run(path) == (0, [expected])
    files(tmp_path / "run/bank", 0)[0].unlink()  # as retention does
    code, (line,) = run(tmp_path / "run")
    assert (code, "3 groups whose tokens were deleted; 0 problems" in line) == (0, True)
    data = files(tmp_path / "run/bank", 1)[0]
    data.write_bytes(data.read_bytes()[:-1])
    code, (problem, line) = run(tmp_path / "run")
    assert (code, "1 problem" in line) == (1, True)
    assert "segment-000001.bin: group 5" in problem
    code, lines = run(tmp_path)
    assert (code, lines) == (1, [])


def test_a_bank_without_groups_is_a_problem(tmp_path):
    (tmp_path / "logs").mkdir()
    code, lines = run(tmp_path)
    assert code == 1
    assert lines[0] == f"{tmp_path / 'bank'}: has no group to audit"
