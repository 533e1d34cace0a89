"""Defines the commands that check a config, or describe a method, before a run."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from dppo_megatron.config import read_config

from .arguments import AsJson, ConfigFile, Overrides, Urls, echo_notes

app = typer.Typer()


@app.command()
def validate(config_file: ConfigFile, overrides: Overrides = None) -> None:
    """Check a config with its model directory, data, objective and ports, without starting anything."""
    from dppo_megatron.run.checks import preflight

    config = read_config(config_file, overrides or ())
    echo_notes(preflight(config, str(config_file)))
    typer.echo(f"{config_file}: valid")


@app.command()
def preflight(config_file: ConfigFile, as_json: AsJson = False, overrides: Overrides = None) -> None:
    """Check nodes, GPUs, network and shared directories in seconds, before a model loads.

    On the first node of a Slurm job it checks the nodes of the job, elsewhere this machine: drivers, GPUs and their
    free memory, an all-reduce in each process group, a broadcast to the serving nodes, access to run.dir, model and
    data on every node, clocks and limits. A failure names the faulty nodes if they are known. Jobs of `dppo-megatron
    slurm` start every attempt with these checks. Exit code 0: no errors; 1: errors; 2: the config is invalid.
    """
    from dppo_megatron.run.checks import load_config
    from dppo_megatron.run.slurm.preflight import preflight_now

    report = preflight_now(load_config(config_file, overrides or ()))
    assert report is not None  # only a job stops its preflight
    typer.echo(json.dumps(report.as_dict(), indent=1) if as_json else report.text())
    raise typer.Exit(1 if report.errors else 0)


@app.command()
def plan(
    config_file: ConfigFile,
    nodes: Annotated[int, typer.Option(min=1, help="machines")],
    gpus_per_node: Annotated[int, typer.Option(min=1, help="devices of each machine")],
    gpu: Annotated[str, typer.Option(help="a100-40|a100-80|l40s-48|h100-80|h20-96|h200-141|b200-192|cpu-GIB")],
    rank: Annotated[int | None, typer.Option(help="trainer rank to show; default: one with the largest need")] = None,
    lengths: Annotated[Path | None, typer.Option(help="run, or file of lengths: predict time and staleness")] = None,
    tokens_per_s: Annotated[float, typer.Option(min=1e-3, help="--lengths: sampling speed of one response")] = 50.0,
    train_s: Annotated[float, typer.Option(min=0, help="--lengths: seconds to train and publish a step")] = 60.0,
    store_mb_per_s: Annotated[float, typer.Option(min=1e-3, help="--lengths: speed of the orchestrator")] = 100.0,
    overrides: Overrides = None,
) -> None:
    """Print the memory that each rank of a layout needs, and the best changes when it does not fit.

    Needs config.json at model.path, and no weights, GPUs or network. Exit code 1 when the layout does not fit.
    """
    from dppo_megatron.run.plan import Cluster, RankBuilder, advise, hardware, make_plan, report
    from dppo_megatron.run.plan.pace import pace_report, pace_settings, read_lengths

    config = read_config(config_file, overrides or ())
    cluster = Cluster(nodes, gpus_per_node, hardware(gpu))
    with RankBuilder() as builder:
        layout_plan = make_plan(config, cluster, builder, rank, source=str(config_file))
        typer.echo(report(layout_plan, [] if layout_plan.fits else advise(layout_plan, builder)))
    if lengths is not None:
        settings = pace_settings(
            config, layout_plan.hf, tokens_per_s=tokens_per_s, train_s=train_s, store_mb_per_s=store_mb_per_s
        )
        typer.echo("\n" + "\n".join(pace_report(read_lengths(lengths, config.rollout.group_size), settings)))
    raise typer.Exit(0 if layout_plan.fits else 1)


@app.command()
def certify(
    config_file: ConfigFile,
    prompts: Annotated[int, typer.Option(min=1, help="first prompts of the order; up to 4 answers to each")] = 16,
    within: Annotated[float | None, typer.Option(min=0, help="exit code 1 when a token differs by more nats")] = None,
    run: Annotated[Path | None, typer.Option(help="first publish this run's newest checkpoint to the engine")] = None,
    urls: Urls = None,
    as_json: AsJson = False,
    overrides: Overrides = None,
) -> None:
    """Measure the difference between engine and trainer on model.path, and name the first operator that differs.

    Starts an engine and the trainer's ranks on this machine, and writes the certificate to RUN/certify/MODEL-N.
    """
    from dppo_megatron.lab.certify.certificate_text import exceeds, text
    from dppo_megatron.lab.certify.command import certify as measure

    config = read_config(config_file, overrides or ())
    report = partial(typer.echo, err=True)
    path, certificate = measure(config, str(config_file), prompts=prompts, run=run, urls=urls or (), report=report)
    typer.echo(json.dumps(certificate, indent=1) if as_json else text(certificate))
    typer.echo(f"certificate: {path}", err=True)
    raise typer.Exit(1 if within is not None and exceeds(certificate, within) else 0)


@app.command(hidden=True)
def certify_rank(
    config_file: ConfigFile,
    url: Annotated[str, typer.Argument(metavar="URL", help="the engine")],
    prompts: Annotated[int, typer.Option(min=1)] = 16,
    checkpoint: Annotated[Path | None, typer.Option()] = None,
) -> None:
    """Run one rank of `certify`, which starts this command."""
    from dppo_megatron.lab.certify.rank import run_rank

    run_rank(read_config(config_file), url, prompts, checkpoint)


@app.command()
def objectives(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="describe it, or a module:attribute")] = None,
) -> None:
    """List the training objectives with their axes, or describe one of them."""
    from dppo_megatron.objectives.listing import in_words, table

    typer.echo(table() if name is None else in_words(name))
