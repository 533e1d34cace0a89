"""Examines a run step by step, after its end or while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dppo_megatron.bank import BankEntry, BankError, BankReader
from dppo_megatron.observability.history import History, ReportError, read_settings
from dppo_megatron.observability.names import is_step_record
from dppo_megatron.observability.run_state import RunState, run_state
from dppo_megatron.observability.tail import JsonlFollower
from dppo_megatron.run_dir import RunDir, run_below

from .checks import CHECKS, Check
from .steps import ExaminedStep, Past
from .tokenizer_file import TokenizerFile


@dataclass
class Finding:
    """Describes one problem of a run. `evidence` comes from the step `since`, the first with the problem."""

    name: str
    since: int
    last: int
    steps: int  # number of steps with the problem
    evidence: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.name}: {self.evidence} (step {self.since}); {self.remedy}"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for `doctor --json`, with the name under its published key `sign`."""
        fields = asdict(self)
        return {"sign": fields.pop("name"), **fields}


EARLIER = 200  # steps before a resume that are checked again, so that their findings are not reported twice
DIED, REMEDY = "run died", "remove the cause, then `train --resume`"


class Examination:
    """Follows a run. Reads the bank's index and a few tokens of every step, and keeps a few numbers of each step."""

    def __init__(self, run_dir: Path):
        self._run = RunDir(run_dir)
        self._follower = JsonlFollower(self._run.metrics)
        self.findings: dict[str, Finding] = {}
        self.unread = ""  # why some rollouts were not read
        self.state: RunState | None = None  # of `diagnose`
        self._begin()

    def _begin(self) -> None:
        self._rows: dict[int, dict[str, Any]] = {}  # records of the steps to examine
        self._past = Past()
        self.examined = 0  # last step
        self._source: _ExaminedRun | None = None

    def advance(self, *, rollouts: bool = True) -> list[Finding]:
        """Examine the steps since the last call, and return the findings that they show for the first time.

        With `rollouts` it also reads the bank, which costs some milliseconds a step. Without, as at a resume, it checks
        only the newest EARLIER steps, and keeps the numbers of the others.
        """
        records, restarted = self._follower.poll()
        if restarted:  # a resumed run repeats steps; earlier findings stay
            self._begin()
        for record in records:
            step = record["step"]
            if step <= self.examined:  # an evaluation ends after its step, which was examined already
                step, record = self.examined + 1, {n: v for n, v in record.items() if n.startswith("eval/")}
            self._rows.setdefault(step, {}).update(record)
        new = []
        numbers = sorted(step for step, row in self._rows.items() if is_step_record(row))
        checked = set(numbers if rollouts else numbers[-EARLIER:])
        for number in numbers:
            new += self._examine(number, self._rows.pop(number), rollouts, CHECKS if number in checked else ())
            self.examined = number
        return new

    def close(self) -> None:
        self._follower.close()

    def _examine(self, number: int, row: dict[str, Any], rollouts: bool, checks: Sequence[Check]) -> list[Finding]:
        if self._source is None:
            self._source = _ExaminedRun(self._run)
        step, new = self._source.step(number, row, rollouts), []
        for name, look, remedy in checks:
            try:
                evidence = look(step, self._past)
            except BankError as error:  # missing or damaged bytes, which the trainer reports itself
                self.unread, evidence = str(error), None
            if evidence is None:
                continue
            if found := self.findings.get(name):
                found.last, found.steps = number, found.steps + 1
            else:
                new.append(Finding(name, number, number, 1, evidence, remedy))
        self.findings |= {found.name: found for found in new}
        self.unread = self.unread or self._source.problem
        self._past.add(step)
        return new


class _ExaminedRun:
    """Builds the examined steps from a run's config, bank and tokenizer."""

    def __init__(self, run: RunDir):
        self._setting = setting = History(run.root.name, read_settings(run.root), {}, ()).setting
        supervised = setting("objective.name", str) == "nll"
        self._groups = 0 if supervised else max(0, setting("rollout.prompts_per_step", int) or 0)
        self._reader = BankReader(setting("rollout.bank", str) or run.bank)
        model = setting("model.path", str)
        self._tokenizer = TokenizerFile.load(run.model(model) or Path(model or ""))
        self.problem = ""

    def step(self, number: int, row: dict[str, Any], rollouts: bool) -> ExaminedStep:
        entries = self._entries(number) if rollouts else []
        return ExaminedStep(number, row, entries, self._reader.read, self._setting, self._tokenizer)

    def _entries(self, number: int) -> list[BankEntry]:
        reader, last = self._reader, number * self._groups
        try:
            if reader.num_groups < last:
                reader.refresh()
            return reader.entries(min(last - self._groups, reader.num_groups), min(last, reader.num_groups))
        except BankError as error:
            self.problem = str(error)
            return []


def diagnose(run_dir: Path) -> Examination:
    """Examine all steps of a run and its state. Raises `ReportError` if the directory has no run."""
    examination, run = Examination(run_dir), RunDir(run_dir)
    examination.advance()
    examination.close()
    state = examination.state = run_state(run)
    if state.kind == "new":  # no step and no log
        raise ReportError(f"{run.root}: not a run{run_below(run.root) or '; name the run.dir of a run'}")
    if state.kind == "died":
        prefix = run.flight_recorder.name
        dumps = f"; `torchfrtrace {run.logs} --prefix {prefix}` shows the collectives of each rank"
        why = state.why + (dumps if any(run.logs.glob(f"{prefix}*")) else "")
        examination.findings[DIED] = Finding(DIED, state.step, state.step, 1, why, REMEDY)
    return examination


def text(examination: Examination) -> str:
    """Return the findings as text: name, steps, evidence and remedy."""
    state = examination.state
    lines = [] if state is None or state.kind == "died" else [f"state: {state}"]
    for found in sorted(examination.findings.values(), key=lambda finding: finding.since):
        span = f"step {found.since}" if found.last == found.since else f"steps {found.since} to {found.last}"
        lines += [f"{found.name}: {span} ({found.steps})", f"  {found.evidence}", f"  -> {found.remedy}"]
    if examination.unread:
        lines.append(f"some rollouts were not read: {examination.unread}")
    if not examination.findings:
        lines.append(f"nothing found in {examination.examined} steps")
    return "\n".join(lines)
