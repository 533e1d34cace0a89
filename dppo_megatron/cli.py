"""The commands. Each reads one YAML config, checks all of it, and only then starts work."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated

import typer

from .checks import load_config
from .common import working_directory
from .config import ConfigError, read_config, save_resolved
from .convert.commands import app as convert_app
from .errors import ExpectedError
from .run_dir import RunDir

app = typer.Typer(
    help="RL for language models on Megatron-core with divergence trust regions (DPPO, DRPO).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(convert_app, name="convert")
data_app = typer.Typer(help="Look at prompt files; prepare known datasets from files you have.", no_args_is_help=True)
app.add_typer(data_app, name="data")

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML config; examples/ has some")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="override one setting; may be repeated")
]
Resume = Annotated[bool, typer.Option("--resume", help="continue from the last checkpoint and the bank")]


@app.command()
def train(config_file: ConfigFile, overrides: Overrides = None, resume: Resume = False) -> None:
    """Train on this machine: starts and watches engines, orchestrator and trainer ranks.

    Ctrl-C or SIGTERM ends all of them and leaves a run that --resume continues.
    """
    from .checks import check_run_dir, preflight
    from .launch.local_processes import local_plan
    from .launch.local_run import LocalRun
    from .observability.report import write_report

    config = read_config(config_file, overrides or ())
    run = RunDir(config.run.dir)
    check_run_dir(config, str(config_file), resume=resume)
    for note in preflight(config, str(config_file)):
        typer.echo(note)
    run.make()
    save_resolved(config, run.config)
    code = LocalRun(config, local_plan(config, resume=resume)).run()
    if code == 0:
        typer.echo(f"report: {write_report(run.root)}")
    raise typer.Exit(code)


@app.command()
def trainer(
    config_file: ConfigFile,
    overrides: Overrides = None,
    resume: Resume = False,
    needs_gpu: Annotated[bool, typer.Option("--needs-gpu", help="fail where no GPU is visible")] = False,
) -> None:
    """Run one trainer rank (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT as torchrun or srun set them)."""
    from .checks.devices import require_gpu
    from .trainer.main import run_trainer

    if needs_gpu:
        require_gpu()
    run_trainer(load_config(config_file, overrides or ()), resume=resume)


@app.command()
def sample(
    config_file: ConfigFile,
    n: Annotated[int | None, typer.Option("--n", min=2, help="answers to each; default: rollout.group_size")] = None,
    prompts: Annotated[
        int | None, typer.Option(min=1, help="of the prompt order, from its start; default: every row of data.train")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="run directory to make; default: RUN/samples")] = None,
    overrides: Overrides = None,
    resume: Resume = False,
) -> None:
    """Fill a bank with answers of model.path to the training prompts, by the config's engines and without a trainer.

    `data filter` then keeps prompts by their pass rate, and `rollout.bank` trains on the answers.
    """
    from .launch.sample import fill_bank
    from .orchestrator.pass_rates import measure

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
    prompts: Annotated[
        int | None, typer.Option(min=1, help="answer so many with model.path and end, without a trainer")
    ] = None,
) -> None:
    """Sample, score and store rollouts for a trainer that follows the same run directory."""
    from .orchestrator.main import run_orchestrator

    run_orchestrator(load_config(config_file, overrides or ()), prompts)


@app.command()
def engine(
    config_file: ConfigFile,
    overrides: Overrides = None,
    index: Annotated[int, typer.Option(help="which of engine.count engines this is")] = 0,
) -> None:
    """Run one inference server of the run in the foreground and announce it once it answers."""
    from .launch.engine import run_engine

    raise typer.Exit(run_engine(load_config(config_file, overrides or ()), index))


@app.command(name="eval")
def evaluate(
    config_file: ConfigFile,
    model: Annotated[
        Path | None, typer.Option(help="model directory or checkpoint of a run; default: the run's final model")
    ] = None,
    urls: Annotated[
        list[str] | None,
        typer.Option("--url", metavar="URL", help="a running engine that no run uses; without --model as it is now"),
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the newest evaluation of this model")] = False,
) -> None:
    """Evaluate a model on the config's sets of held-out prompts, with engines of its own or running ones.

    Prints a line a set; the answers are in RUN/eval/MODEL-N/answers.
    """
    from .launch.evaluate import evaluate_model
    from .orchestrator.evaluation import describe

    config = load_config(config_file, overrides or ())
    if model is None and not urls:
        model = RunDir(config.run.dir).final_model
    for name, metrics in evaluate_model(config, model, str(config_file), urls=urls or (), resume=resume).items():
        typer.echo(f"{model or ', '.join(urls or ())}: {describe(name, metrics)}")


@app.command()
def validate(config_file: ConfigFile, overrides: Overrides = None) -> None:
    """Check a config, its model directory, its data, its objective and its ports, and start nothing."""
    from .checks import preflight

    config = read_config(config_file, overrides or ())
    for note in preflight(config, str(config_file)):
        typer.echo(note)
    typer.echo(f"{config_file}: valid")


@app.command()
def plan(
    config_file: ConfigFile,
    nodes: Annotated[int, typer.Option(min=1, help="machines")],
    gpus_per_node: Annotated[int, typer.Option(min=1, help="devices of each")],
    gpu: Annotated[str, typer.Option(help="a100-40|a100-80|l40s-48|h100-80|h20-96|h200-141|b200-192|cpu-GIB")],
    rank: Annotated[int | None, typer.Option(help="trainer rank to show; default: one that needs most")] = None,
    overrides: Overrides = None,
) -> None:
    """Print what each rank of a layout holds and needs, and what to change first where it does not fit.

    Needs config.json at model.path (no weights) and neither GPUs nor a network. Exit 1 when it does not fit.
    """
    from .plan import Cluster, RankBuilder, advise, hardware, make_plan, report

    config = read_config(config_file, overrides or ())
    cluster = Cluster(nodes, gpus_per_node, hardware(gpu))
    with RankBuilder() as builder:
        made = make_plan(config, cluster, builder, rank, source=str(config_file))
        typer.echo(report(made, [] if made.fits else advise(made, builder)))
    raise typer.Exit(0 if made.fits else 1)


@data_app.command("inspect")
def inspect_data(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSONL, parquet, or a dataset directory")],
    config_file: Annotated[Path | None, typer.Option("--config", help="columns, template, model, reward")] = None,
    overrides: Overrides = None,
    model: Annotated[Path | None, typer.Option(help="directory with the tokenizer; default: the config's")] = None,
    prompt_column: Annotated[str | None, typer.Option(help="default: the config's, or prompt")] = None,
    answer_column: Annotated[str | None, typer.Option(help="default: the config's, or answer")] = None,
    reward: Annotated[str | None, typer.Option(help="check answers for it; default: the config's, or none")] = None,
) -> None:
    """Print rows, columns, lengths, one rendered prompt, duplicates, and rows and answers that cannot be used."""
    from .config.schema import DataConfig, RewardConfig
    from .data.inspection import inspect
    from .data.tokenizer import load_tokenizer
    from .rewards import RewardPool

    config = None if config_file is None else read_config(config_file, overrides or ())
    if config is None and overrides:
        raise typer.BadParameter("--set changes a config; give one with --config")
    columns = {"prompt_column": prompt_column, "answer_column": answer_column, "train": file}
    data = (DataConfig(train=file) if config is None else config.data).model_copy(
        update={name: value for name, value in columns.items() if value is not None}
    )
    directory = model or (None if config is None else config.model.path)
    tokenizer = None if directory is None else load_tokenizer(directory)
    graded = RewardConfig(name=reward) if reward else None if config is None else config.reward
    if graded is None:
        typer.echo(inspect(file, data, tokenizer, None))
        return
    with RewardPool(graded) as rewards:
        typer.echo(inspect(file, data, tokenizer, rewards.check_answers))


@data_app.command("prepare")
def prepare_data(
    recipe: Annotated[str, typer.Argument(help="dapo-math-17k | math | aime-2024 | aime-2025 | gsm8k")],
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="the published dataset: parquet, JSONL, directory")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="JSONL to write; must not exist")],
    levels: Annotated[str, typer.Option(metavar="FROM:TO", help="levels of MATH that are kept")] = "1:5",
) -> None:
    """Write the prompts of a known dataset, each once, with answers that graders read. Downloads nothing."""
    from .data.recipes import prepare

    first, _, last = levels.partition(":")
    if not (first.isdigit() and last.isdigit()):
        raise typer.BadParameter("levels are FROM:TO, e.g. 3:5")
    typer.echo(prepare(recipe, source, out, levels=(int(first), int(last))))


@data_app.command("filter")
def filter_data(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="JSONL to write; must not exist")],
    bank: Annotated[Path, typer.Option(help="bank that `sample` or a run filled")],
    pass_rate: Annotated[str, typer.Option(metavar="FROM:TO", help="kept, both included, e.g. 0.2:0.8")],
    pass_reward: Annotated[float, typer.Option(help="an answer is right with at least this reward")] = 1.0,
) -> None:
    """Keep the prompts whose share of right answers in a bank lies in a range, and say what became of the others."""
    from .orchestrator.pass_rates import keep

    try:
        lowest, highest = (float(bound) for bound in pass_rate.split(":"))
    except ValueError:
        raise typer.BadParameter("a pass rate is FROM:TO, e.g. 0.2:0.8") from None
    typer.echo(keep(bank, out, lowest, highest, pass_reward))


@app.command()
def objectives(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="one of them, or package.module:attribute, in words")
    ] = None,
) -> None:
    """List the training objectives with their axes, or describe one of them."""
    from .objectives.listing import in_words, table

    typer.echo(table() if name is None else in_words(name))


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="run directories; several are compared")],
    out: Annotated[Path | None, typer.Option(help="where to write; default: RUN/report")] = None,
) -> None:
    """Print the table of a run and draw its curves; several runs are laid over each other."""
    from .observability.report import write_report

    typer.echo(write_report(runs if len(runs) > 1 else runs[0], out))


@app.command()
def study(
    study_file: Annotated[Path, typer.Argument(metavar="STUDY", help="YAML: base, methods, conditions, seeds")],
    out: Annotated[Path, typer.Option(help="directory of runs, table and report; holds what is done already")],
    only: Annotated[int | None, typer.Option(help="this run alone, from 0: for a job array")] = None,
    report_only: Annotated[bool, typer.Option("--report", help="draw what there is, and run nothing")] = False,
) -> None:
    """Train every method under every condition with every seed, and compare them with intervals."""
    from .study.grid import read_study
    from .study.report import write_report
    from .study.runner import run_study

    read = read_study(study_file, out.absolute())
    if not report_only:
        run_study(read, out.absolute(), typer.echo, only)
    typer.echo(f"report: {write_report(read.file, out)}")


@app.command()
def doctor(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="run directory, of a run that goes on or ended")],
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Say what is wrong with a run: what, since which step, the evidence, what to do. Exit 1 when anything is."""
    import dataclasses
    import json

    from .doctor import diagnose, text

    found = diagnose(run_dir)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in found.findings.values()], indent=1))
    else:
        typer.echo(text(found))
    raise typer.Exit(1 if found.findings else 0)


@app.command()
def slurm(
    config_file: ConfigFile,
    overrides: Overrides = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="TRAINERS[+ENGINES]",
            help="other numbers of nodes than the config's, with as many ranks and engines on each as it has",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the batch script; write and submit nothing")
    ] = False,
    resume: Resume = False,
) -> None:
    """Check a config, write its batch script into the run directory and submit it to Slurm.

    The config's slurm section sets how many nodes train and serve, and what the site needs (docs/slurm.md).
    """
    from .slurm.submit import prepare, submit

    prepared = prepare(config_file, overrides or (), nodes, resume=resume)
    if dry_run:
        typer.echo(prepared.script, nl=False)
        return
    for note in prepared.notes:
        typer.echo(note)
    job, script = submit(prepared)
    run = RunDir(prepared.config.run.dir)
    typer.echo(
        f"submitted job {job} ({script})\n"
        f"  dppo-megatron status {run.root}          step, reward, engines, queue, last errors\n"
        f"  tail -F {run.logs / f'slurm-{job}.out'}\n"
        f"  scancel {job}                            ends it; --signal=USR2 --batch first saves a checkpoint"
    )


@app.command()
def status(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="run directory")],
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Show step, reward, engines' health, queue state, restarts and the last error of each log.

    From any machine that sees RUN, e.g. the login node; also for runs without Slurm.
    """
    import json

    from .slurm.status import read_status
    from .slurm.status_view import show

    found = read_status(run_dir)
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=1))
    else:
        show(found)


@app.command(name="slurm-job", hidden=True)
def slurm_job(config_file: ConfigFile, overrides: Overrides = None, resume: Resume = False) -> None:
    """Drive a run inside a Slurm allocation; the last line of slurm/train.sbatch."""
    from .slurm.job import run_job

    raise typer.Exit(run_job(config_file, overrides or (), resume=resume))


@app.command(name="slurm-task", hidden=True)
def slurm_task(
    role: Annotated[str, typer.Argument(help="check, trainer, orchestrator or engine")],
    config_file: ConfigFile,
    resume: Resume = False,
    index: Annotated[int, typer.Option(help="which engine")] = 0,
    first_gpu: Annotated[int, typer.Option(help="its first GPU among those of its node")] = 0,
) -> None:
    """Run one task of a job step; srun starts it."""
    from .slurm.task import run_task

    raise typer.Exit(run_task(role, config_file, resume=resume, index=index, first_gpu=first_gpu))


def main() -> None:
    """Entry point. What a user can act on is printed as it is, without a traceback: exit 2 for a config, else 1."""
    working_directory.put_on_path()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of files and a user's objective may hold what UTF-8 has not
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except ExpectedError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
