"""Examines a run step by step, after its end or while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dppo_megatron.bank import BankEntry, BankError, BankReader
from dppo_megatron.data.tokenizer_file import TokenizerFile
from dppo_megatron.report.history import History, ReportError, read_settings
from dppo_megatron.report.logs import last_lines
from dppo_megatron.report.names import is_step_record
from dppo_megatron.report.run_state import RunState, run_state
from dppo_megatron.report.tail import JsonlFollower, Select
from dppo_megatron.run_dir import RunDir, run_below

from .checks import CHECKS, Check
from .steps import ExaminedStep, Past


@dataclass
class Finding:
    """Describes a run's problem. `evidence` comes from `since`, the first step with the problem."""

    name: str
    since: int
    last: int
    steps: int  # number of steps with the problem
    evidence: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.name}: {self.evidence} (step {self.since}); {self.remedy}"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for `doctor --json`, with the name under the published key `sign`."""
        fields = asdict(self)
        return {"sign": fields.pop("name"), **fields}


EARLIER = 200  # steps before a resume that are checked again, so that findings are not reported twice
DIED, REMEDY = "run died", "remove the cause, then `train --resume`"
# Each row has parts of messages and a remedy, which docs/faq.md explains: "a part|another => remedy".
_ROWS = Path(__file__).with_name("known_causes.txt").read_text().splitlines()
KNOWN_CAUSES = [(part, remedy) for parts, remedy in (row.split(" => ") for row in _ROWS) for part in parts.split("|")]


class Examination:
    """Follows a run. Reads the bank index and a few tokens of every step, and keeps a few numbers per step.

    `select` chooses which metrics.jsonl lines are read at the start.
    """

    def __init__(self, run_dir: Path, select: Select = iter):
        self._run = RunDir(run_dir)
        self._follower = JsonlFollower(self._run.metrics, select)
        self.findings: dict[str, Finding] = {}
        self.unread = ""  # why some rollouts were not read
        self.state: RunState | None = None  # set by `diagnose`
        self._begin()

    def _begin(self) -> None:
        self._rows: dict[int, dict[str, Any]] = {}  # records of steps to examine
        self._past = Past()
        self.examined = 0  # last step
        self.last_step: dict[str, Any] | None = None  # the last step record
        self._source: _ExaminedRun | None = None

    def advance(self, *, rollouts: bool = True) -> list[Finding]:
        """Examine the steps since the last call, and return new findings.

        With `rollouts`, also read the bank, which costs some milliseconds a step. Without, as at a resume, check only
        the newest EARLIER steps, and keep only numbers of the other steps.
        """
        records, restarted = self._follower.poll()
        if restarted:  # a resumed trainer removed the steps that it repeats; earlier findings stay
            self._begin()
            rollouts = False
        for record in records:
            step = record["step"]
            if is_step_record(record):
                self.last_step = record
            if step <= self.examined:  # an evaluation ends after its step was examined
                step, record = self.examined + 1, {n: v for n, v in record.items() if n.startswith("eval/")}
            self._rows.setdefault(step, {}).update(record)
        new = []
        steps = sorted(step for step, row in self._rows.items() if is_step_record(row))
        checked = set(steps if rollouts else steps[-EARLIER:])
        # Also evaluations of steps that `select` left out.
        for number in sorted(step for step in self._rows if steps and step <= steps[-1]):
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
            except BankError as error:  # missing or damaged bytes; the trainer reports them
                self.unread, evidence = str(error), None
            if evidence is None:
                continue
            if finding := self.findings.get(name):
                finding.last, finding.steps = number, finding.steps + 1
            else:
                new.append(Finding(name, number, number, 1, evidence, remedy))
        self.findings |= {finding.name: finding for finding in new}
        self.unread = self.unread or self._source.problem
        self._past.add(step)
        return new


class _ExaminedRun:
    """Builds the examined steps from a run's config, bank and tokenizer."""

    def __init__(self, run: RunDir):
        self._setting = setting = History(run.root.name, read_settings(run.root), {}, ()).setting
        supervised = setting("objective.name", str) == "nll"
        self._groups = 0 if supervised else max(0, setting("rollout.prompts_per_step", int) or 0)
        bank = Path(setting("rollout.bank", str) or run.bank)
        self._reader = BankReader(bank)
        model = setting("model.path", str)
        self._tokenizer = TokenizerFile.load(run.model(model) or Path(model or ""))
        # Without config.yaml, the settings that checks read are also unknown.
        absent = [path for path in (run.config, bank) if not (supervised or path.exists())]
        self.problem = f"{absent[0]} is missing; restore it" if absent else ""

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
    """Examine a run's state and all steps. Raises `ReportError` if the directory has no run."""
    examination, run = Examination(run_dir), RunDir(run_dir)
    examination.advance()
    examination.close()
    state = examination.state = run_state(run, examination.last_step)
    if state.kind == "new":  # no step and no log
        raise ReportError(f"{run.root}: not a run{run_below(run.root) or '; name the run.dir of a run'}")
    if state.kind == "died":
        prefix = run.flight_recorder.name
        dumps = f"; `torchfrtrace {run.logs} --prefix {prefix}` shows the collectives of each rank"
        cause, remedy = known_cause(state.reason, run.logs)
        cause += dumps if any(run.logs.glob(f"{prefix}*")) else ""
        examination.findings[DIED] = Finding(DIED, state.step, state.step, 1, cause, remedy)
    return examination


def known_cause(cause: str, logs: Path) -> tuple[str, str]:
    """Return (cause, remedy). Unless `cause` is known, the first log line with a known cause is added to it."""
    oldest = sorted(logs.glob("*.log"), key=lambda log: log.stat().st_mtime)[:32]  # a failed process writes first
    lines = ((cause, cause), *((line, f"{cause}; {line} ({log})") for log in oldest for line in last_lines(log, 400)))
    matches = ((shown, remedy) for line, shown in lines for part, remedy in KNOWN_CAUSES if part in line)
    return next(((shown, f"{remedy}; then `train --resume`") for shown, remedy in matches), (cause, REMEDY))


def text(examination: Examination) -> str:
    """Return the findings as text: name, steps, evidence and remedy."""
    state = examination.state
    lines = [] if state is None or state.kind == "died" else [f"state: {state}"]
    for finding in sorted(examination.findings.values(), key=lambda finding: finding.since):
        span = f"step {finding.since}" if finding.last == finding.since else f"steps {finding.since} to {finding.last}"
        lines += [f"{finding.name}: {span} ({finding.steps})", f"  {finding.evidence}", f"  -> {finding.remedy}"]
    if examination.unread:
        lines.append(f"some rollouts were not read: {examination.unread}")
    if not examination.findings:
        steps = examination.examined
        lines.append(f"nothing found in {steps} steps" if steps else "no step examined: metrics.jsonl has none")
    return "\n".join(lines)
