"""Defines the arguments that several commands take."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError

from dppo_megatron.common.stdio import at_words
from dppo_megatron.config.load import run_of
from dppo_megatron.config.section import Url


def _urls(urls: list[str] | None) -> list[str] | None:
    """Raise `typer.BadParameter` for a malformed URL."""
    try:
        return TypeAdapter(list[Url] | None).validate_python(urls)
    except ValidationError as error:
        raise typer.BadParameter(f"{error.errors()[0]['input']}: {error.errors()[0]['msg']}") from None


def echo_notes(notes: Iterable[str], *, err: bool = False) -> None:
    """Print notes about a config; a terminal gets lines that end between words."""
    for note in notes:
        typer.echo(at_words(note, sys.stderr if err else sys.stdout), err=err)


ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML config; examples/ has some")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="override one setting; may be repeated")
]
Resume = Annotated[bool, typer.Option("--resume", help="continue from the last checkpoint and the bank")]
RunDirectory = Annotated[
    Path, typer.Argument(metavar="RUN", callback=run_of, help="directory or config of a running or ended run")
]
RunOrBank = Annotated[
    Path, typer.Argument(metavar="RUN_OR_BANK", callback=run_of, help="directory or config of a run, or only a bank")
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON for programs")]
Urls = Annotated[
    list[str] | None,
    typer.Option("--url", metavar="URL", callback=_urls, help="use this running engine, which serves no run"),
]
