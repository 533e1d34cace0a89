"""Defines the commands that report on running and ended runs."""

from __future__ import annotations

import json
import sys
import time
import webbrowser
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dppo_megatron.config.load import run_of
from dppo_megatron.run_dir import RunDir

from .arguments import AsJson, RunDirectory, RunOrBank

app = typer.Typer()


@app.command()
def status(run_dir: RunDirectory, as_json: AsJson = False) -> None:
    """Show step, reward, engines' health, queue state, restarts and the last error of each log.

    Works on any machine that can read RUN, such as the login node, with and without Slurm.
    """
    from dppo_megatron.run.slurm.status import read_status, show

    run_status = read_status(run_dir)
    if as_json:
        typer.echo(json.dumps(asdict(run_status), indent=1))
    else:
        show(run_status)


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="directories or configs of runs; several are compared")
    ],
    out: Annotated[
        Path | None, typer.Option(help="default: RUN/report; for several: comparison-N next to the first")
    ] = None,
) -> None:
    """Print a run's summary table and draw its curves; several runs are overlaid."""
    from dppo_megatron.report.report import write_report

    typer.echo(write_report([run_of(run) for run in runs], out))


@app.command()
def view(
    root: RunOrBank,
    others: Annotated[list[Path] | None, typer.Argument(metavar="[OTHER...]", help="runs or banks to compare")] = None,
    out: Annotated[Path | None, typer.Option(help="HTML file; default: view[-with-OTHER].html in RUN_OR_BANK")] = None,
    model: Annotated[Path | None, typer.Option(help="directory of the tokenizer; default: the run's model")] = None,
    open_it: Annotated[bool, typer.Option("--open", help="open the file in the browser")] = False,
    follow: Annotated[bool, typer.Option(help="write the file again every 30 s until RUN ends")] = False,
) -> None:
    """Write the curves, rollouts and tokens of one or several runs to an HTML file that needs no server.

    The runs may be running, ended or crashed; the page names unreadable files. The page of a run that is active can
    reload itself every 30 s.
    """
    from dppo_megatron.lab.view import write_view
    from dppo_megatron.report.run_state import run_state

    active = True
    while active:
        active = follow and run_state(RunDir(root)).kind in ("queued", "starting", "running", "waiting")
        typer.echo(path := write_view(root, out, model, [run_of(other) for other in others or ()]))
        open_it = open_it and not webbrowser.open(path.absolute().as_uri() + "#reload=1" * active)
        time.sleep(30 * active)


@app.command()
def doctor(run_dir: RunDirectory, as_json: AsJson = False) -> None:
    """List the problems of a run with their first step, the evidence and a remedy. Exit code 1 when there are any."""
    from dppo_megatron.report.doctor import diagnose, text

    examination = diagnose(run_dir)
    if as_json:
        typer.echo(json.dumps([finding.as_dict() for finding in examination.findings.values()], indent=1))
    else:
        typer.echo(text(examination))
    raise typer.Exit(1 if examination.findings else 0)


@app.command()
def audit(root: RunOrBank) -> None:
    """Count a bank's tokens by origin, and list every turn that is not trained on exactly once, as sampled.

    The run may be running, ended or crashed. Exit code 1 when there is a problem.
    """
    from dppo_megatron.bank.audit import Audit, audit_bank
    from dppo_megatron.lab.view.source import Source

    report, printed = Audit(), 0
    with typer.progressbar(label="audit", length=0, file=sys.stderr) as bar:
        for done, total, report in audit_bank(Source.open(root).bank):
            bar.length = total
            bar.update(done - bar.pos)
            for problem in report.problems[printed:]:
                typer.echo(problem)
            printed = len(report.problems)
    typer.echo(report)
    raise typer.Exit(1 if report.problems else 0)


@app.command()
def study(
    study_file: Annotated[Path, typer.Argument(metavar="STUDY", help="YAML: base, methods, conditions, seeds")],
    out: Annotated[Path, typer.Option(help="directory of runs, table and report; finished runs are kept")],
    only: Annotated[int | None, typer.Option(help="run only this number, from 0, as a task of a job array")] = None,
    report_only: Annotated[bool, typer.Option("--report", help="only report on the finished runs")] = False,
) -> None:
    """Train every method under every condition with every seed, and compare the results with intervals."""
    from dppo_megatron.lab.study.grid import read_study
    from dppo_megatron.lab.study.runner import run_study
    from dppo_megatron.lab.study.study_report import write_report

    study_grid = read_study(study_file, out.absolute())
    if not report_only:
        run_study(study_grid, out.absolute(), typer.echo, only)
    typer.echo(f"report: {write_report(study_grid.file, out)}")
