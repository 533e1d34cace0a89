"""`dppo-megatron data`: the commands that inspect, prepare and filter prompt files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dppo_megatron.config import read_config

from .arguments import Overrides

app = typer.Typer(help="Inspect prompt files, and prepare known datasets from local files.", no_args_is_help=True)


@app.command("inspect")
def inspect_data(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSONL, parquet, or a dataset directory")],
    config_file: Annotated[Path | None, typer.Option("--config", help="columns, template, model, reward")] = None,
    overrides: Overrides = None,
    model: Annotated[Path | None, typer.Option(help="directory with the tokenizer; default: the config's")] = None,
    prompt_column: Annotated[str | None, typer.Option(help="default: the config's, or prompt")] = None,
    answer_column: Annotated[str | None, typer.Option(help="default: the config's, or answer")] = None,
    reward: Annotated[str | None, typer.Option(help="reward that reads the answers; default: the config's")] = None,
) -> None:
    """Print rows, columns, lengths, a rendered prompt, duplicates, and unusable rows and answers."""
    from dppo_megatron.config.schema import DataConfig, RewardConfig
    from dppo_megatron.data.inspection import inspect
    from dppo_megatron.data.tokenizer import load_tokenizer
    from dppo_megatron.rollout.rewards import RewardPool

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


@app.command("prepare")
def prepare_data(
    recipe: Annotated[str, typer.Argument(help="dapo-math-17k | math | aime-2024 | aime-2025 | gsm8k")],
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="the published dataset: parquet, JSONL, directory")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="new JSONL file")],
    levels: Annotated[str, typer.Option(metavar="FROM:TO", help="range of levels of MATH to keep")] = "1:5",
) -> None:
    """Write the unique prompts of a known dataset with answers that the rewards can read. Downloads nothing."""
    from dppo_megatron.data.recipes import prepare

    first, _, last = levels.partition(":")
    if not (first.isdigit() and last.isdigit()):
        raise typer.BadParameter("levels are FROM:TO, e.g. 3:5")
    typer.echo(prepare(recipe, source, out, levels=(int(first), int(last))))


@app.command("filter")
def filter_data(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="new JSONL file")],
    bank: Annotated[Path, typer.Option(help="bank of `sample` or of a run")],
    pass_rate: Annotated[str, typer.Option(metavar="FROM:TO", help="pass rates to keep, inclusive, e.g. 0.2:0.8")],
    pass_reward: Annotated[float, typer.Option(help="smallest reward of a right answer")] = 1.0,
) -> None:
    """Keep the prompts with a share of right answers in the given range, and count the others by reason."""
    from dppo_megatron.rollout.orchestrator.pass_rates import keep

    try:
        lowest, highest = (float(bound) for bound in pass_rate.split(":"))
    except ValueError:
        raise typer.BadParameter("a pass rate is FROM:TO, e.g. 0.2:0.8") from None
    typer.echo(keep(bank, out, lowest, highest, pass_reward))
