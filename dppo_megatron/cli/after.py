"""Commands that look at runs: going on, ended, many of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def status(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="run directory")],
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Show step, reward, engines' health, queue state, restarts and the last error of each log.

    From any machine that sees RUN, e.g. the login node; also for runs without Slurm.
    """
    import json

    from dppo_megatron.slurm.status import read_status
    from dppo_megatron.slurm.status_view import show

    found = read_status(run_dir)
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=1))
    else:
        show(found)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="run directories; several are compared")],
    out: Annotated[Path | None, typer.Option(help="where to write; default: RUN/report")] = None,
) -> None:
    """Print the table of a run and draw its curves; several runs are laid over each other."""
    from dppo_megatron.observability.report import write_report

    typer.echo(write_report(runs if len(runs) > 1 else runs[0], out))


@app.command()
def view(
    root: Annotated[Path, typer.Argument(metavar="RUN_OR_BANK", help="run directory, or only a bank")],
    other: Annotated[Path | None, typer.Argument(metavar="[OTHER]", help="a second one to compare with")] = None,
    out: Annotated[
        Path | None, typer.Option(help="HTML file; default: view.html, view-with-OTHER.html in RUN_OR_BANK")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="whose tokenizer; default: the run's model.path")] = None,
    open_it: Annotated[bool, typer.Option("--open", help="in the browser")] = False,
) -> None:
    """Write curves, rollouts and their tokens of a run, or of two to compare, to one HTML file without a server.

    Of runs that go on, ended or crashed; what cannot be read is said on the page.
    """
    import webbrowser

    from dppo_megatron.view import write_view

    path = write_view(root, out, model, other)
    typer.echo(path)
    if open_it:
        webbrowser.open(path.absolute().as_uri())


@app.command()
def doctor(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="run directory, of a run that goes on or ended")],
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Say what is wrong with a run: what, since which step, the evidence, what to do. Exit 1 when anything is."""
    import json

    from dppo_megatron.doctor import diagnose, text

    found = diagnose(run_dir)
    if as_json:
        typer.echo(json.dumps([finding.as_dict() for finding in found.findings.values()], indent=1))
    else:
        typer.echo(text(found))
    raise typer.Exit(1 if found.findings else 0)


@app.command()
def audit(
    root: Annotated[Path, typer.Argument(metavar="RUN_OR_BANK", help="run directory, or a bank alone")],
) -> None:
    """Count a bank's tokens by where they came from, and name every turn that would not be trained on once, as sampled.

    Of runs that go on, ended or crashed. Exit 1 when there is a problem.
    """
    import sys

    from dppo_megatron.bank.audit import Audit, audit_bank
    from dppo_megatron.view.source import Source

    found, said = Audit(), 0
    with typer.progressbar(label="audit", length=0, file=sys.stderr) as bar:
        for done, total, found in audit_bank(Source.of(root).bank):
            bar.length = total
            bar.update(done - bar.pos)
            for problem in found.problems[said:]:
                typer.echo(problem)
            said = len(found.problems)
    typer.echo(found)
    raise typer.Exit(1 if found.problems else 0)


@app.command()
def study(
    study_file: Annotated[Path, typer.Argument(metavar="STUDY", help="YAML: base, methods, conditions, seeds")],
    out: Annotated[Path, typer.Option(help="directory of runs, table and report; holds what is done already")],
    only: Annotated[int | None, typer.Option(help="this run alone, from 0: for a job array")] = None,
    report_only: Annotated[bool, typer.Option("--report", help="draw what there is, and run nothing")] = False,
) -> None:
    """Train every method under every condition with every seed, and compare them with intervals."""
    from dppo_megatron.study.grid import read_study
    from dppo_megatron.study.report import write_report
    from dppo_megatron.study.runner import run_study

    read = read_study(study_file, out.absolute())
    if not report_only:
        run_study(read, out.absolute(), typer.echo, only)
    typer.echo(f"report: {write_report(read.file, out)}")
