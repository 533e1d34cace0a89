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
from dppo_megatron.common.stdio import at_words, outlive_readers
from dppo_megatron.config import ConfigError
from dppo_megatron.config.load import setting_of
from dppo_megatron.convert.commands import app as convert_app
from dppo_megatron.errors import ExpectedError

from . import after, before, cluster, data, init, runs

_UsageError: Any = typer.BadParameter.__base__  # typer does not export this class


_PANELS = {  # title in the help -> its commands
    "Run": "init train slurm eval sample study",
    "Before a run": "validate plan preflight certify objectives data",
    "During and after a run": "status report view doctor audit",
    "Models": "convert",
    "One process of a run, which train and slurm start": "trainer orchestrator engine",
}


class _Commands(typer.core.TyperGroup):
    """Groups commands in the help, and corrects arguments.

    It suggests `--set optimizer.lr=VALUE` for `--lr 1e-5`, `optimizer.lr=1e-5` and `--set lr 1e-5`.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        for title, names in _PANELS.items():
            for name in names.split():
                vars(self.commands[name])["rich_help_panel"] = title
        return sorted(super().list_commands(ctx), key=" ".join(_PANELS.values()).find)

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
                for option, argument in itertools.pairwise(arguments):
                    if option == "--set" and "=" not in argument:
                        error.message += f"; write --set {setting_of(argument)}=VALUE"
            raise


app = typer.Typer(
    cls=_Commands,
    help="RL for language models on Megatron-core with divergence trust regions (DPPO, DRPO).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(version: bool) -> None:
    if version:
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
        print(at_words(str(error), sys.stderr), file=sys.stderr)
        sys.exit(2)
    except ExpectedError as error:
        is_child = sys.argv[1] in ("engine", "orchestrator", "trainer")  # readers of their logs search for error names
        print(at_words(f"{type(error).__name__ if is_child else 'error'}: {error}", sys.stderr), file=sys.stderr)
        sys.exit(1)
