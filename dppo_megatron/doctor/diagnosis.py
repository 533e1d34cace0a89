"""The signs in a table, and how a run is examined: step by step, whether it ended or goes on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dppo_megatron.bank import BankEntry, BankError, BankReader
from dppo_megatron.observability.history import ReportError, load_history
from dppo_megatron.observability.logs import root_cause
from dppo_megatron.observability.names import is_step_record
from dppo_megatron.observability.tail import JsonlFollower
from dppo_megatron.run_dir import RunDir

from . import signs_of_rollouts, signs_of_training
from .steps import Past, Step
from .vocabulary import Vocabulary

SIGNS = (
    signs_of_rollouts.constant_reward,
    signs_of_training.no_learning_signal,
    signs_of_training.reward_stands_still,
    signs_of_training.rewards_failed,
    signs_of_rollouts.cloned_samples,
    signs_of_rollouts.other_temperature,
    signs_of_rollouts.other_tokenizer,
    signs_of_rollouts.wrong_special_tokens,
    signs_of_training.truncated,
    signs_of_training.out_of_turns,
    signs_of_training.length_exploded,
    signs_of_training.entropy_collapsed,
    signs_of_training.everything_masked,
    signs_of_training.stale_beyond_bound,
    signs_of_training.non_finite,
    signs_of_rollouts.routes_missing,
    signs_of_training.differs_from_the_start,
    signs_of_training.weights_did_not_arrive,
    signs_of_training.mismatch_grows,
)


@dataclass
class Finding:
    """One sign of a run. `evidence` is of the step `since`, the first that showed it."""

    sign: str
    since: int
    last: int
    steps: int  # that showed it
    evidence: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.sign}: {self.evidence} (step {self.since}); {self.remedy}"


NO_STEP = Finding("no step", 0, 0, 0, "", "remove the cause, then `train --resume`")


class Examination:
    """Follows a run. Reads the bank's index and a few tokens of every step; keeps a few numbers of each."""

    def __init__(self, run_dir: Path | str):
        self._run = RunDir(Path(run_dir))
        self._follower = JsonlFollower(self._run.metrics)
        self.findings: dict[str, Finding] = {}
        self.unread = ""  # why rollouts were not looked at
        self._begin()

    def _begin(self) -> None:
        self._rows: dict[int, dict[str, Any]] = {}  # of steps that were not examined yet
        self._past = Past()
        self.examined = 0  # last step
        self._source: _Source | None = None

    def advance(self, *, rollouts: bool = True) -> list[Finding]:
        """Examines the steps since the last call; returns what they show for the first time.

        rollouts: look into the bank, some milliseconds a step; else the metrics alone are judged.
        """
        records, restarted = self._follower.poll()
        if restarted:  # a resumed run repeats steps; what it was found to have stays said
            self._begin()
        for record in records:
            if isinstance(step := record.get("step"), int) and step > self.examined:
                self._rows.setdefault(step, {}).update(record)
        new = []
        for number in sorted(step for step, row in self._rows.items() if is_step_record(row)):
            new += self._examine(number, self._rows.pop(number), rollouts)
            self.examined = number
        return new

    def close(self) -> None:
        self._follower.close()

    def _examine(self, number: int, row: dict[str, Any], rollouts: bool) -> list[Finding]:
        if self._source is None:
            self._source = _Source(self._run)
        step, new = self._source.step(number, row, rollouts), []
        for sign in SIGNS:
            try:
                evidence = sign.look(step, self._past)
            except BankError as error:  # gone or damaged bytes; the trainer says so itself
                self.unread, evidence = str(error), None
            if evidence is None:
                continue
            if found := self.findings.get(sign.name):
                found.last, found.steps = number, found.steps + 1
            else:
                new.append(Finding(sign.name, number, number, 1, evidence, sign.remedy))
        self.findings |= {found.sign: found for found in new}
        self.unread = self.unread or self._source.problem
        self._past.add(step)
        return new


class _Source:
    """What a run's steps are made from: config, bank and tokenizer."""

    def __init__(self, run: RunDir):
        self._setting = setting = load_history(run.root, run.root.name).setting
        supervised = setting("objective.name", str) == "nll"
        self._groups = 0 if supervised else max(0, setting("rollout.prompts_per_step", int) or 0)
        self._reader = BankReader(setting("rollout.bank", str) or run.bank)
        model = setting("model.path", str)
        self._vocabulary = Vocabulary.load(run.model(model) or Path(model or ""))
        self.problem = ""

    def step(self, number: int, row: dict[str, Any], rollouts: bool) -> Step:
        entries = self._entries(number) if rollouts else []
        return Step(number, row, entries, self._reader.read, self._setting, self._vocabulary)

    def _entries(self, number: int) -> list[BankEntry]:
        reader, last = self._reader, number * self._groups
        try:
            if reader.num_groups < last:
                reader.refresh()
            return reader.entries(min(last - self._groups, reader.num_groups), min(last, reader.num_groups))
        except BankError as error:
            self.problem = str(error)
            return []


def diagnose(run_dir: Path | str) -> Examination:
    """Examines all steps of a run, or the logs of one without a step. Raises `ReportError` when they name no cause."""
    examination, run = Examination(run_dir), RunDir(Path(run_dir))
    examination.advance()
    examination.close()
    if not examination.examined:
        # A process that fails ends the others, whose logs are written after it.
        logs = sorted(run.logs.glob("*.log"), key=lambda log: log.stat().st_mtime)
        if not (cause := next(filter(None, map(root_cause, logs)), None)):
            raise ReportError(f"{run.metrics} holds no step: name the directory of a run that trained")
        examination.findings[NO_STEP.sign] = replace(NO_STEP, evidence=cause)
    return examination


def text(examination: Examination) -> str:
    """For people: what, since when, evidence, what to do."""
    lines = []
    for found in sorted(examination.findings.values(), key=lambda finding: finding.since):
        span = f"step {found.since}" if found.last == found.since else f"steps {found.since} to {found.last}"
        lines += [f"{found.sign}: {span} ({found.steps})", f"  {found.evidence}", f"  -> {found.remedy}"]
    if examination.unread:
        lines.append(f"rollouts were not all looked at: {examination.unread}")
    return "\n".join(lines) or f"nothing found in {examination.examined} steps"
