"""Defines the command line. Each command reads and checks its whole config before it starts work."""

from __future__ import annotations

import itertools
import re
import sys
from typing import Annotated, Any

import typer

import dppo_megatron
from dppo_megatron.common import working_directory
from dppo_megatron.common.process import follow_parent
from dppo_megatron.common.stdio import outlive_readers
from dppo_megatron.config import ConfigError
from dppo_megatron.config.load import setting_of
from dppo_megatron.convert.commands import app as convert_app
from dppo_megatron.errors import ExpectedError

from . import after, before, cluster, data, init, runs

_UsageError: Any = typer.BadParameter.__base__  # typer does not export this class


class _Commands(typer.core.TyperGroup):
    """Suggests `--set optimizer.lr=VALUE` for the arguments `--lr 1e-5`, `optimizer.lr=1e-5` and `--set lr 1e-5`."""

    def invoke(self, ctx: Any) -> Any:
        arguments = ctx.args
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            if error.ctx and any(parameter.name == "overrides" for parameter in error.ctx.command.params):
                if name := getattr(error, "option_name", "").lstrip("-").replace("-", "_"):
                    path = name in ("config", "config_file", "config_path")
                    meant = "CONFIG without an option" if path else f"--set {setting_of(name)}=VALUE"
                    error.possibilities = [*(error.possibilities or ()), meant]
                for name, value in re.findall(r"([\w.]+)(=[^\s)]+)", error.message):
                    error.message += f"; write --set {setting_of(name)}{value}"
                for option, given in itertools.pairwise(arguments):
                    if option == "--set" and "=" not in given:
                        error.message += f"; write --set {setting_of(given)}=VALUE"
            raise


app = typer.Typer(
    cls=_Commands,
    help="RL for language models on Megatron-core with divergence trust regions (DPPO, DRPO).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dppo-megatron {dppo_megatron.__version__}")
        raise typer.Exit


Version = typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")


@app.callback()
def _options(version: Annotated[bool, Version] = False) -> None:
    """Declare the options of the program itself."""


for commands in (init, runs, before, after, cluster):
    app.add_typer(commands.app)
app.add_typer(convert_app, name="convert")
app.add_typer(data.app, name="data")


def main() -> None:
    """Run the command line. Expected errors are printed without a traceback, with exit code 2 for a config, else 1."""
    follow_parent()
    working_directory.put_on_path()
    outlive_readers()
    try:
        app()
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except ExpectedError as error:
        of_a_run = sys.argv[1] in ("engine", "orchestrator", "trainer")  # readers of their logs search for error names
        print(f"{type(error).__name__ if of_a_run else 'error'}: {error}", file=sys.stderr)
        sys.exit(1)
