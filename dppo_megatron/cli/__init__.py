"""The commands. Each reads one YAML config, checks all of it, and only then starts work."""

from __future__ import annotations

import io
import sys

import typer

from dppo_megatron.common import working_directory
from dppo_megatron.common.process import follow_parent
from dppo_megatron.config import ConfigError
from dppo_megatron.convert.commands import app as convert_app
from dppo_megatron.errors import ExpectedError

from . import after, before, cluster, data, init, runs

app = typer.Typer(
    help="RL for language models on Megatron-core with divergence trust regions (DPPO, DRPO).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for commands in (init, runs, before, after, cluster):
    app.add_typer(commands.app)
app.add_typer(convert_app, name="convert")
app.add_typer(data.app, name="data")


def main() -> None:
    """Entry point. What a user can act on is printed as it is, without a traceback: exit 2 for a config, else 1."""
    follow_parent()
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
