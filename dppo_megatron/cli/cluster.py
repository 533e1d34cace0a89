"""Defines the commands for Slurm; the job scripts call the hidden ones."""

from __future__ import annotations

from typing import Annotated

import typer

from dppo_megatron.run_dir import RunDir

from .arguments import ConfigFile, Overrides, Resume, echo_notes

app = typer.Typer()


@app.command()
def slurm(
    config_file: ConfigFile,
    overrides: Overrides = None,
    nodes: Annotated[
        str | None, typer.Option(metavar="TRAINERS[+ENGINES]", help="other numbers of nodes, at the same load per node")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only print the script; notes, steps to stderr")] = False,
    resume: Resume = False,
) -> None:
    """Check a config, write its batch script into the run directory and submit it to Slurm.

    The config's slurm section has the numbers of nodes and the settings of the site (docs/slurm.md).
    """
    from dppo_megatron.run.slurm.step import steps_of_job
    from dppo_megatron.run.slurm.submit import prepare, submit

    prepared = prepare(config_file, overrides or (), nodes, resume=resume, place="unstaged" if dry_run else "elsewhere")
    echo_notes(prepared.notes, err=dry_run)  # stdout must contain only the script, for sbatch
    if dry_run:
        typer.echo(steps_of_job(prepared.config, resume=resume), err=True)
        typer.echo(prepared.script, nl=False)
        return
    job, script = submit(prepared)
    run = RunDir(prepared.config.run.dir)
    typer.echo(
        f"submitted job {job} ({script})\n"
        f"  dppo-megatron status {run.root}          step, reward, engines, queue, last errors\n"
        f"  tail -F {run.logs / f'slurm-{job}.out'}\n"
        f"  scancel {job}                            ends it; --signal=USR2 --batch first saves a checkpoint"
    )


@app.command(name="slurm-job", hidden=True)
def slurm_job(config_file: ConfigFile, overrides: Overrides = None, resume: Resume = False) -> None:
    """Drive a run inside a Slurm allocation; the last line of slurm/train.sbatch."""
    from dppo_megatron.run.slurm.job import run_job

    raise typer.Exit(run_job(config_file, overrides or (), resume=resume))


@app.command(name="slurm-task", hidden=True)
def slurm_task(
    role: Annotated[str, typer.Argument(help="check, trainer, orchestrator, engine; of a preflight: trains, serves")],
    config_file: ConfigFile,
    resume: Resume = False,
    index: Annotated[int, typer.Option(help="which engine")] = 0,
    first_gpu: Annotated[int, typer.Option(help="its first GPU among those of its node")] = 0,
    meeting: Annotated[str, typer.Option(help="of a preflight: where its processes meet")] = "",
) -> None:
    """Run one task of a job step, started by srun."""
    from dppo_megatron.run.slurm.task import run_preflight_task, run_task

    if meeting:
        raise typer.Exit(run_preflight_task(config_file, meeting, first_gpu, serves=role == "serves"))
    raise typer.Exit(run_task(role, config_file, resume=resume, index=index, first_gpu=first_gpu))
