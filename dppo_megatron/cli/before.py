"""Commands that look at a config before it costs anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dppo_megatron.config import read_config

from .arguments import ConfigFile, Overrides

app = typer.Typer()


@app.command()
def validate(config_file: ConfigFile, overrides: Overrides = None) -> None:
    """Check a config, its model directory, its data, its objective and its ports, and start nothing."""
    from dppo_megatron.checks import preflight

    config = read_config(config_file, overrides or ())
    for note in preflight(config, str(config_file)):
        typer.echo(note)
    typer.echo(f"{config_file}: valid")


@app.command()
def preflight(
    config_file: ConfigFile,
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
    overrides: Overrides = None,
) -> None:
    """Check nodes, GPUs, network and shared directories in seconds, before a model loads.

    Inside a Slurm job (on its first node) it checks the job's nodes, elsewhere this machine: drivers, GPUs and their
    free memory, an all-reduce in each process group of the layout, a broadcast to the nodes that serve, whether every
    node sees run.dir, model and data, clocks and limits. Each failure names the node. A job that `dppo-megatron slurm`
    submits does this first, in every attempt. Exit 0: no errors; 1: errors; 2: the config is refused.
    """
    import json

    from dppo_megatron.checks import load_config
    from dppo_megatron.slurm.preflight import preflight_now

    found = preflight_now(load_config(config_file, overrides or ()))
    typer.echo(json.dumps(found.as_dict(), indent=1) if as_json else found.text())
    raise typer.Exit(1 if found.errors else 0)


@app.command()
def plan(
    config_file: ConfigFile,
    nodes: Annotated[int, typer.Option(min=1, help="machines")],
    gpus_per_node: Annotated[int, typer.Option(min=1, help="devices of each")],
    gpu: Annotated[str, typer.Option(help="a100-40|a100-80|l40s-48|h100-80|h20-96|h200-141|b200-192|cpu-GIB")],
    rank: Annotated[int | None, typer.Option(help="trainer rank to show; default: one that needs most")] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(help="lengths of sampled responses, a group a line, or a run: predicts time and staleness, too"),
    ] = None,
    tokens_per_s: Annotated[
        float, typer.Option(min=1e-3, help="with --lengths: that an engine samples of one response")
    ] = 50.0,
    train_s: Annotated[
        float, typer.Option(min=0, help="with --lengths: that the trainer takes for a step and its publish")
    ] = 60.0,
    store_mb_per_s: Annotated[
        float,
        typer.Option(min=1e-3, help="with --lengths: that the orchestrator stores; benchmarks/scale.py measures it"),
    ] = 100.0,
    overrides: Overrides = None,
) -> None:
    """Print what each rank of a layout holds and needs, and what to change first where it does not fit.

    Needs config.json at model.path (no weights) and neither GPUs nor a network. Exit 1 when it does not fit.
    """
    from dppo_megatron.plan import Cluster, RankBuilder, advise, hardware, make_plan, report
    from dppo_megatron.plan.pace import pace_report, pace_settings, read_lengths

    config = read_config(config_file, overrides or ())
    cluster = Cluster(nodes, gpus_per_node, hardware(gpu))
    with RankBuilder() as builder:
        made = make_plan(config, cluster, builder, rank, source=str(config_file))
        typer.echo(report(made, [] if made.fits else advise(made, builder)))
    if lengths is not None:
        settings = pace_settings(
            config, made.hf, tokens_per_s=tokens_per_s, train_s=train_s, store_mb_per_s=store_mb_per_s
        )
        typer.echo("\n" + "\n".join(pace_report(read_lengths(lengths, config.rollout.group_size), settings)))
    raise typer.Exit(0 if made.fits else 1)


@app.command()
def certify(
    config_file: ConfigFile,
    prompts: Annotated[int, typer.Option(min=1, help="from the start of their order; up to 4 answers to each")] = 16,
    within: Annotated[
        float | None, typer.Option(min=0, help="exit 1 where a sampled token's log-prob differs by more nats")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(help="run whose newest checkpoint the trainer loads and publishes to the engine first"),
    ] = None,
    urls: Annotated[
        list[str] | None, typer.Option("--url", metavar="URL", help="a running engine that no run uses")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
    overrides: Overrides = None,
) -> None:
    """Measure how far engine and trainer are apart on model.path, and name the operator that is the first to differ.

    Starts an engine and the trainer's ranks on this machine. The certificate is in RUN/certify/MODEL-N.
    """
    import json

    from dppo_megatron.certify.command import certify as measure
    from dppo_megatron.certify.report import exceeds, text

    config = read_config(config_file, overrides or ())
    path, found = measure(
        config,
        str(config_file),
        prompts=prompts,
        run=run,
        urls=urls or (),
        report=lambda line: typer.echo(line, err=True),
    )
    typer.echo(json.dumps(found, indent=1) if as_json else text(found))
    typer.echo(f"certificate: {path}", err=True)
    raise typer.Exit(1 if within is not None and exceeds(found, within) else 0)


@app.command(hidden=True)
def certify_rank(
    config_file: ConfigFile,
    url: Annotated[str, typer.Argument(metavar="URL", help="the engine")],
    prompts: Annotated[int, typer.Option(min=1)] = 16,
    checkpoint: Annotated[Path | None, typer.Option()] = None,
) -> None:
    """One rank of `certify`, which starts it."""
    from dppo_megatron.certify.rank import run_rank

    run_rank(read_config(config_file), url, prompts, checkpoint)


@app.command()
def objectives(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="one of them, or package.module:attribute, in words")
    ] = None,
) -> None:
    """List the training objectives with their axes, or describe one of them."""
    from dppo_megatron.objectives.listing import in_words, table

    typer.echo(table() if name is None else in_words(name))
