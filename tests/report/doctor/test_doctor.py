"""Runs of six steps with a fault planted in step 4: the doctor names it and finds nothing before."""

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from dppo_megatron.cli import app
from dppo_megatron.report.doctor import Examination, diagnose, text
from dppo_megatron.report.doctor.checks import CHECKS
from dppo_megatron.report.doctor.diagnosis import EARLIER
from dppo_megatron.report.history import ReportError
from dppo_megatron.run_dir import RunDir
from dppo_megatron.types import Rollout, RolloutGroup
from tests.support.tokenizers import save_character_model

from .runs import GROUPS, HEALTHY_ROW, PLANTED, SAMPLES, VOCAB, Groups, Row, routes, write_run


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_character_model(tmp_path_factory.mktemp("model"))


def from_planted(change):
    return lambda step, row, groups: change(row, groups) if step >= PLANTED else None


def metric(**values):
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return from_planted(lambda row, groups: row.update(named))


def each_rollout(change: Callable[[Rollout], Rollout]):
    def changed(row: Row, groups: Groups) -> Groups:
        return [replace(g, rollouts=tuple(map(change, g.rollouts))) for g in groups]

    return from_planted(changed)


def each_group(change: Callable[[RolloutGroup], RolloutGroup]):
    return from_planted(lambda row, groups: [change(g) for g in groups])


def colder(rollout: Rollout) -> Rollout:
    """Log-probs as of temperature 0.5 for tokens sampled at temperature 1."""
    scaled = 2 * rollout.rollout_topk_logprob
    total = np.log(np.exp(scaled).sum(axis=1, keepdims=True))
    return replace(
        rollout, rollout_logprob=2 * rollout.rollout_logprob - total[:, 0], rollout_topk_logprob=scaled - total
    )


def with_prompt(text: Callable[[str], str], ids: Callable[[np.ndarray], np.ndarray]):
    def changed(g: RolloutGroup) -> RolloutGroup:
        prompt = replace(g.prompt, text=text(g.prompt.text), token_ids=ids(g.prompt.token_ids).astype(np.int32))
        length = len(prompt.token_ids) + len(g.rollouts[0].token_ids) - 1
        return replace(g, prompt=prompt, rollouts=tuple(replace(r, routed_experts=routes(length)) for r in g.rollouts))

    return each_group(changed)


def no_signal(row: Row, groups: Groups) -> Groups:
    row["rollout/groups_without_signal"] = GROUPS
    return [replace(g, rewards=np.full(SAMPLES, i, np.float32)) for i, g in enumerate(groups)]


def drift(step: int, row: Row, groups: Groups) -> None:
    row["mismatch/kl"] = 1e-4 * 4.0 ** (step - 2) if step > 2 else 1e-4


def old_versions(step: int, row: Row, groups: Groups) -> Groups:
    frozen = min(step - 1, 0)
    return [
        replace(g, rollouts=tuple(replace(r, versions=np.full_like(r.versions, frozen)) for r in g.rollouts))
        for g in groups
    ]


def held_out(step: int, row: Row, gain: float = 0.01) -> None:
    """The training reward rises from step 4 on."""
    row["rollout/reward_mean"] = 0.3 if step < PLANTED else 0.9
    row["eval/reward_mean"] = 0.3 + gain * step


SPECIAL = 1  # <eos> of the character model
PLANTED_FAULTS = [
    ("constant reward", each_group(lambda g: replace(g, rewards=np.ones(SAMPLES, np.float32)))),
    ("no learning signal", from_planted(no_signal)),
    ("no learning signal", metric(train__grad_norm=0.0)),
    ("rewards fail", metric(rollout__reward_failed=3.0, reward__failed_timeout=3.0)),
    ("cloned samples", each_group(lambda g: replace(g, rollouts=(g.rollouts[0],) * SAMPLES))),
    ("log-probs of another temperature", each_rollout(colder)),
    ("log-probs of another temperature", each_group(lambda g: replace(g, temperature=0.5))),
    ("tokenizer of another model", with_prompt(str, lambda ids: (ids + 1) % VOCAB)),
    ("wrong special tokens", with_prompt(str, lambda ids: np.concatenate(([SPECIAL, SPECIAL], ids)))),
    ("wrong special tokens", with_prompt(lambda text: f"<|im_start|>user {text}", np.asarray)),
    ("truncation", metric(rollout__truncated_share=0.9)),
    ("alike answers", each_rollout(lambda r: replace(r, token_ids=np.full_like(r.token_ids, 40)))),
    ("alike answers", each_rollout(lambda r: replace(r, token_ids=np.arange(40, dtype=np.int32) + 2))),
    ("held-out reward does not follow", lambda step, row, groups: held_out(step, row)),
    ("gradient norm spikes", lambda step, row, groups: row.update({"train/grad_norm": 9.0 if step == 6 else 0.5})),
    ("out of turns", metric(environment__max_turns_share=0.9)),
    ("length explosion", metric(rollout__response_tokens_mean=400.0)),
    ("entropy collapse", metric(train__entropy=0.01, rollout__reward_mean=0.3)),
    ("everything masked", metric(policy__masked_share=0.97)),
    ("stale beyond the bound", metric(rollout__staleness_max=7.0)),
    ("not finite", metric(train__loss=None)),
    ("not finite", metric(train__nonfinite_tokens=12.0)),
    ("not finite", metric(train__skipped_updates=2.0, train__overflowed_updates=1.0)),
    ("routes missing", each_rollout(lambda r: replace(r, routed_experts=None))),
    ("weights did not arrive", metric(mismatch__kl=0.4)),
    ("weights did not arrive", old_versions),
    ("mismatch grows", drift),
    ("short lists of a teacher", metric(distillation__tail_mass_teacher=0.11)),
]


@pytest.mark.parametrize(("sign", "fault"), PLANTED_FAULTS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(PLANTED_FAULTS)])
def test_a_planted_fault_is_named_within_a_step(sign, fault, tmp_path, model):
    findings = diagnose(write_run(tmp_path, model, fault)).findings
    assert PLANTED <= findings[sign].since <= PLANTED + (2 if sign == "gradient norm spikes" else 1), findings
    assert min(found.since for found in findings.values()) >= PLANTED


@pytest.mark.parametrize(("token", "named"), [(127, False), (128, True)], ids=["padding", "beyond the model"])
def test_a_sampled_row_of_padding_is_of_this_model(tmp_path, model, token, named):
    """The character model has fewer tokens than its 128 rows."""
    sampled = each_rollout(lambda r: replace(r, token_ids=np.full_like(r.token_ids, token)))
    assert ("tokenizer of another model" in diagnose(write_run(tmp_path, model, sampled)).findings) == named


def test_engine_and_trainer_that_differ_from_the_start(tmp_path, model):
    run = write_run(tmp_path, model, lambda step, row, groups: row.update({"mismatch/kl": 0.3}))
    assert diagnose(run).findings["engine and trainer differ from the start"].since == 1


@pytest.mark.parametrize(("dtype", "since"), [("bf16", 2), ("fp32", None)])
def test_engines_that_round_updates_away_are_named_after_the_first_update(tmp_path, model, dtype, since):
    def rounding(step, row, groups):
        row["mismatch/kl"] = 1.2e-3 if step == 1 else 7.4e-3

    findings = diagnose(write_run(tmp_path, model, rounding, trainer="fp32", engine=dtype)).findings
    assert {name: found.since for name, found in findings.items()} == ({"mismatch grows": since} if since else {})
    assert since is None or "bf16 engines round small updates" in findings["mismatch grows"].evidence


def of_metrics(tmp_path: Path, rewards: list[float]) -> Path:
    """A run without its bank."""
    config = {"optimizer": {"lr": 1e-4}, "rollout": {"prompts_per_step": GROUPS}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    rows = [HEALTHY_ROW | {"step": i, "time": float(i), "rollout/reward_mean": r} for i, r in enumerate(rewards, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def noisy(rise: float, steps: int = 80) -> list[float]:
    rng = np.random.default_rng(1)
    return [float(r) for r in 0.4 + rise * np.arange(steps) / steps + 0.05 * rng.normal(size=steps)]


def test_a_reward_that_stands_still(tmp_path):
    findings = diagnose(of_metrics(tmp_path, noisy(0.0))).findings
    assert list(findings) == ["reward stands still"]
    assert findings["reward stands still"].since > 50


def test_the_causes_of_failed_rewards_are_named_with_the_most_frequent_first(tmp_path, model):
    counts = metric(rollout__reward_failed=4.0, reward__failed_timeout=1.0, environment__failed_raised=3.0)
    finding = diagnose(write_run(tmp_path, model, counts)).findings["rewards fail"]
    assert re.search(r"4 of \d+ samples have no reward: environment raised 3, reward timeout 1", str(finding))
    assert "correct the environment or agent where that failed" in str(finding)


@pytest.mark.parametrize("rewards", [noisy(0.3), [0.2 + 0.1 * min(i, 8) for i in range(80)]], ids=["rises", "solved"])
def test_a_reward_that_does_not_stand_still(rewards, tmp_path):
    assert diagnose(of_metrics(tmp_path, rewards)).findings == {}


def solved(step: int, row: Row, groups: Groups) -> Groups:
    """Ever more prompts are answered by all samples."""
    row["train/entropy"] = 1.0 / 4**step
    shares = [0.3, 0.6, 0.75, 0.9, 1.0, 1.0]
    right = [np.arange(SAMPLES) < round(SAMPLES * shares[step - 1]) for _ in groups]
    row["rollout/groups_without_signal"] = float(sum(r.all() for r in right))
    return [replace(g, rewards=r.astype(np.float32)) for g, r in zip(groups, right, strict=True)]


def first_tokens(rollout: Rollout, ids: np.ndarray) -> Rollout:
    """Return a rollout of the tokens `ids`, with an engine that returns no lists."""
    count = len(ids)
    values = {"versions": rollout.versions[:count]}
    experts = rollout.routed_experts[: count - len(rollout.token_ids)]
    lists = {"topk_ids": None, "rollout_topk_logprob": None}
    values["rollout_logprob"] = np.full(count, -1e-3, np.float32)
    return replace(rollout, **values, **lists, token_ids=ids, routed_experts=experts)


def longer(step: int, row: Row, groups: Groups) -> None:
    row["rollout/response_tokens_mean"] = 40.0 * 1.3**step


HEALTHY = {
    "plain": lambda step, row, groups: None,
    "solved": solved,
    "longer answers": longer,
    "bf16 engine": lambda step, row, groups: row.update({"mismatch/kl": 5e-4 * (1 + step % 3)}),
    "fp16 that overflows": lambda step, row, groups: row.update(
        {"train/skipped_updates": 1.0, "train/overflowed_updates": 1.0}
    ),
    "a held-out reward that follows": lambda step, row, groups: held_out(step, row, 0.1),
    "one right number": lambda step, row, groups: [
        replace(g, rollouts=tuple(first_tokens(r, np.full(5, 40, np.int32)) for r in g.rollouts)) for g in groups
    ],
    "without lists and failing now and then": lambda step, row, groups: [
        replace(g, rollouts=tuple(replace(r, topk_ids=None, rollout_topk_logprob=None) for r in g.rollouts))
        for g in groups
    ],
}


@pytest.mark.parametrize("change", HEALTHY.values(), ids=HEALTHY)
def test_a_healthy_run_has_no_finding(change, tmp_path, model):
    examination = diagnose(write_run(tmp_path, model, change))
    assert examination.findings == {}
    assert examination.unread == ""


@pytest.mark.parametrize("reward_of_long", [1.0, 0.0])
def test_truncated_responses_with_rewards_are_healthy(reward_of_long, tmp_path, model):
    """Three of four samples have 40 tokens, the limit."""
    long = np.arange(SAMPLES) % 4 > 0

    def change(step: int, row: Row, groups: Groups) -> Groups:
        row["rollout/truncated_share"] = 0.75
        rewards = np.where(long, reward_of_long, 1 - reward_of_long).astype(np.float32)
        return [
            replace(g, rewards=rewards, rollouts=tuple(cut(r, at) for r, at in zip(g.rollouts, long, strict=True)))
            for g in groups
        ]

    run = write_run(tmp_path, model, change)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["rollout"]["max_response_tokens"] = 40
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert ("truncation" in diagnose(run).findings) == (reward_of_long == 0)


def cut(rollout: Rollout, whole: bool) -> Rollout:
    """Return the rollout, or its first 39 tokens."""
    if whole:
        return rollout
    values = {
        name: getattr(rollout, name)[:39]
        for name in ("token_ids", "rollout_logprob", "versions", "topk_ids", "rollout_topk_logprob")
    }
    return replace(rollout, **values, routed_experts=rollout.routed_experts[:-1])


def test_a_run_that_ended_before_its_first_step_names_the_exception(tmp_path):
    with pytest.raises(ReportError, match=r"nothing: not a run; name the run\.dir of a run"):
        diagnose(tmp_path / "nothing")
    (tmp_path / "around" / "checkpoints").mkdir(parents=True)
    (tmp_path / "around" / "run.lock").touch()
    with pytest.raises(ReportError, match=r"checkpoints: not a run; did you mean .*/around\?"):
        diagnose(tmp_path / "around" / "checkpoints")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "publish/bytes": 3.0}\n')
    with pytest.raises(ReportError, match=r"not a run"):
        diagnose(tmp_path)
    (tmp_path / "logs").mkdir()
    assert (
        CliRunner().invoke(app, ["doctor", str(tmp_path)]).output
        == "state: paused at step 0\nno step examined: metrics.jsonl has none\n"
    )
    for age, name in enumerate(("orchestrator", "engine-0")):  # the engine's log was written before
        log = tmp_path / "logs" / f"{name}.log"
        log.write_text(f"NoReward: of {name}\n")
        os.utime(log, (100 - age,) * 2)
    result = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert result.exit_code == 1
    assert f"NoReward: of engine-0 ({log}, line 1)" in result.output


def test_a_supervised_run_with_falling_entropy_is_healthy(tmp_path):
    run = of_metrics(tmp_path, [0.0] * 60)
    rows = [
        {"step": i, "time": float(i), "train/loss": 2.0 / i, "train/entropy": 2.0 / i, "train/grad_norm": 0.5}
        for i in range(1, 61)
    ]
    run.joinpath("metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert diagnose(run).findings == {}


def test_an_evaluation_that_ends_after_later_steps_is_read(tmp_path):
    run = of_metrics(tmp_path, [0.3] * 3 + [0.9] * 3)
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("")
    examination = Examination(run)
    for number, row in enumerate(rows):
        with (run / "metrics.jsonl").open("a") as file:
            file.write(row)
            examination.advance()
            file.write(json.dumps({"step": max(0, number - 1), "time": 9.0, "eval/reward_mean": 0.3}) + "\n")
        examination.advance()
    assert "held-out reward does not follow" in examination.findings


def test_a_lasting_fault_of_a_growing_run_is_reported_once(tmp_path, model):
    run = write_run(tmp_path, model, metric(policy__masked_share=0.97))
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:3]))
    examination = Examination(run)
    told = [[found.name for found in examination.advance()]]
    for line in lines[3:]:
        with (run / "metrics.jsonl").open("a") as file:
            file.write(line)
        told.append([found.name for found in examination.advance()])
    assert told == [[], ["everything masked"], [], []]
    assert examination.findings["everything masked"].steps == 3


def test_without_its_bank_a_run_is_judged_by_its_metrics(tmp_path, model):
    run = write_run(tmp_path, model, metric(policy__masked_share=0.97))
    for file in (run / "bank").glob("*.bin"):
        file.unlink()
    examination = diagnose(run)
    assert list(examination.findings) == ["everything masked"]
    assert "is gone" in examination.unread


@pytest.mark.parametrize("name", ["bank", "config.yaml", "metrics.jsonl"])
def test_a_part_that_is_missing_is_named(name, tmp_path, model):
    run = write_run(tmp_path, model, metric())
    (run / name).rename(tmp_path / "away")
    (run / "logs").mkdir()
    missing = f"some rollouts were not read: {run / name} is missing; restore it"
    assert ("no step examined: metrics.jsonl has none" if name == "metrics.jsonl" else missing) in text(diagnose(run))


def test_the_command(tmp_path, model):
    run = write_run(tmp_path, model, metric(rollout__staleness_max=7.0))
    result = CliRunner().invoke(app, ["doctor", str(run)])
    assert result.exit_code == 1
    assert "stale beyond the bound: steps 4 to 6 (3)" in result.output
    assert "rollout.max_staleness is 1" in result.output
    (found,) = json.loads(CliRunner().invoke(app, ["doctor", str(run), "--json"]).output)
    assert found["since"] == 4


def test_the_documentation_has_a_line_for_each_sign():
    page = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text()
    table = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")][1:]
    assert table == [name for name, _, _ in CHECKS]


def test_the_cost_of_a_step_does_not_grow(tmp_path):
    """A resumed run examines all earlier steps."""
    examination, calls = Examination(tmp_path), []
    for step in range(1, 401):
        with RunDir(tmp_path).metrics.open("a") as file:
            file.write(json.dumps({"step": step, **HEALTHY_ROW, "rollout/reward_mean": step % 7}) + "\n")
        count = Counter()
        sys.setprofile(lambda _frame, event, _argument, count=count: count.update([event]))
        examination.advance(rollouts=False)
        sys.setprofile(None)
        calls.append(count.total())
    assert examination.examined == 400
    assert max(calls[-20:]) <= 1.1 * min(calls[60:80])


def test_a_resume_checks_only_the_newest_earlier_steps(tmp_path, monkeypatch):
    seen, steps = [], 2 * EARLIER
    monkeypatch.setattr(
        "dppo_megatron.report.doctor.diagnosis.CHECKS", [("seen", lambda step, _: seen.append(step.number), "")]
    )
    lines = (json.dumps({"step": step, **HEALTHY_ROW}) + "\n" for step in range(1, steps + 1))
    RunDir(tmp_path).metrics.write_text("".join(lines))
    examination = Examination(tmp_path)
    examination.advance(rollouts=False)
    assert seen == list(range(steps - EARLIER + 1, steps + 1))
    assert examination._past.steps == steps
