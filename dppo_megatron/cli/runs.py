"""Defines the commands that start a run or one of its processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from dppo_megatron.config import Config, read_config
from dppo_megatron.errors import ExpectedError
from dppo_megatron.run.checks import load_config
from dppo_megatron.run_dir import RunDir

from .arguments import ConfigFile, Overrides, Resume, Urls, echo_notes

app = typer.Typer()


@app.command()
def train(config_file: ConfigFile, overrides: Overrides = None, resume: Resume = False) -> None:
    """Train on this machine: start and supervise engines, orchestrator and trainer ranks.

    Ctrl-C or SIGTERM ends all processes; --resume then continues the run.
    """
    from dppo_megatron.run.checks import check_run_dir, preflight
    from dppo_megatron.run.checks.resume import record
    from dppo_megatron.run.launch.local_processes import local_plan
    from dppo_megatron.run.launch.local_run import LocalRun, finished

    config = read_config(config_file, overrides or ())
    run = RunDir(config.run.dir)
    check_run_dir(config, str(config_file), resume=resume)
    if run.config.exists():  # reports a run in use before errors about its ports
        run.take().release()
    if resume and finished(config):
        done, steps = run.done, config.train.steps
        typer.echo(f"{done} steps are done, train.steps = {steps}; raise it above {done} to continue")
        _show_results(config)
        return
    notes = preflight(config, str(config_file))  # run.dir does not exist yet, so a rejected config leaves nothing
    with run.take() as lock:
        check_run_dir(config, str(config_file), resume=resume)  # again, since another process may have started the run
        echo_notes(notes)
        record(config)
        code = LocalRun(config, local_plan(config, resume=resume), lock).run()
    if code == 0:
        _show_results(config)
    raise typer.Exit(code)


def _show_results(config: Config) -> None:
    from dppo_megatron.report.report import write_report

    run = RunDir(config.run.dir)
    typer.echo(f"report: {write_report(run.root)}\nmodel: {run.final_model}")
    typer.echo(f"next: dppo-megatron view {run.root} --open")
    if config.eval_sets:
        typer.echo(f"      dppo-megatron eval {run.config}")


@app.command()
def trainer(
    config_file: ConfigFile,
    overrides: Overrides = None,
    resume: Resume = False,
    needs_gpu: Annotated[bool, typer.Option("--needs-gpu", help="fail when no GPU is visible")] = False,
) -> None:
    """Run one trainer rank (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT as torchrun or srun set them)."""
    from dppo_megatron.run.checks.devices import require_gpu
    from dppo_megatron.train.trainer.main import run_trainer

    if "RANK" not in os.environ:
        typer.echo("one rank, which waits for the run's other processes; `train` starts all of them", err=True)
    if needs_gpu:
        require_gpu()
    run_trainer(load_config(config_file, overrides or ()), resume=resume)


@app.command()
def sample(
    config_file: ConfigFile,
    n: Annotated[int | None, typer.Option("--n", min=2, help="answers per prompt; default: rollout.group_size")] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="number of prompts; default: all rows")] = None,
    out: Annotated[Path | None, typer.Option(help="new run directory; default: RUN/samples")] = None,
    overrides: Overrides = None,
    resume: Resume = False,
) -> None:
    """Fill a bank with answers of model.path to the training prompts, with the config's engines and no trainer.

    Afterwards `data filter` can select prompts by pass rate, and `rollout.bank` can train on the answers.
    """
    from dppo_megatron.rollout.orchestrator.pass_rates import measure
    from dppo_megatron.run.launch.sample import fill_bank

    config = read_config(config_file, overrides or ())
    n = n or config.rollout.group_size
    code = fill_bank(config, str(config_file), n=n, prompts=prompts, out=out, resume=resume)
    if code == 0:
        bank = RunDir(out or config.run.dir / "samples").bank
        typer.echo(f"{bank}: {measure(bank)}")
    raise typer.Exit(code)


@app.command()
def orchestrator(
    config_file: ConfigFile,
    overrides: Overrides = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="answer only these first prompts, no trainer")] = None,
) -> None:
    """Sample, score and store rollouts for the trainer of the same run directory."""
    from dppo_megatron.rollout.orchestrator.main import run_orchestrator

    run_orchestrator(load_config(config_file, overrides or ()), prompts)


@app.command()
def engine(
    config_file: ConfigFile,
    overrides: Overrides = None,
    index: Annotated[int, typer.Option(help="number of this engine, below engine.count")] = 0,
    node: Annotated[int | None, typer.Option(help="run only this node of an engine over engine.nodes nodes")] = None,
    meeting: Annotated[str, typer.Option(help="with --node: name that all nodes of this start share")] = "",
) -> None:
    """Run one inference server of the run in the foreground, and register it once it answers."""
    from dppo_megatron.run.launch.engine import run_engine

    raise typer.Exit(run_engine(load_config(config_file, overrides or ()), index, node=node, meeting=meeting))


@app.command(name="eval")
def evaluate(
    config_file: ConfigFile,
    model: Annotated[Path | None, typer.Option(help="model or checkpoint; default: the run's final model")] = None,
    urls: Urls = None,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue the newest evaluation of this model")] = False,
) -> None:
    """Evaluate a model on the config's held-out prompts, with new engines or running ones.

    With --url and no --model the engines keep their weights. Prints a line per set, and writes the answers to
    RUN/eval/MODEL-N/answers.
    """
    from dppo_megatron.report.heldout import describe
    from dppo_megatron.run.launch.evaluate import evaluate_model

    config = load_config(config_file, overrides or ())
    if model is None and not urls:
        model = RunDir(config.run.dir).final_model
        if not model.exists():
            raise ExpectedError(f"run.dir = {config.run.dir}: no trained model; train it, or evaluate with --model DIR")
    for name, metrics in evaluate_model(config, model, str(config_file), urls=urls or (), resume=resume).items():
        typer.echo(f"{model or ', '.join(urls or ())}: {describe(name, metrics)}")
