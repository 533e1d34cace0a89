"""Implements the commands `dppo-megatron convert ...`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dppo_megatron.common.dtypes import DTYPES, FloatName
from dppo_megatron.errors import ExpectedError

if TYPE_CHECKING:
    import torch

    from .job import Conversion

app = typer.Typer(
    help="Convert model weights between Hugging Face directories and Megatron checkpoints, one weight at a time.",
    no_args_is_help=True,
    invoke_without_command=True,
)


class VerificationFailed(ExpectedError, RuntimeError):
    """Raised when the Hugging Face and the Megatron model compute different logits."""


CheckOption = Annotated[
    Path | None,
    typer.Option(
        "--check", metavar="DIR", help="list the supported features of a model directory; needs only config.json"
    ),
]
Destination = Annotated[Path, typer.Argument(metavar="DST", help="directory to make; must not exist")]
DtypeOption = Annotated[FloatName | None, typer.Option("--dtype", help="cast to; default: as stored (FP8: bf16)")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="print the mapping of the tensors and write nothing")]
Verify = Annotated[bool, typer.Option("--verify", help="afterwards compare the logits of both models, in fp32")]
Resume = Annotated[bool, typer.Option("--resume", help="continue an interrupted conversion to DST")]
Processes = Annotated[int, typer.Option("--nproc", min=1, help="processes; ignored under torchrun and srun")]
ShardSize = Annotated[float, typer.Option("--shard-gb", min=1e-6, help="largest weight file, in 10^9 bytes")]
QuantizationOption = Annotated[
    Literal["fp8_block"] | None,
    typer.Option("--quantization", help="fp8_block: projections as e4m3 with a scale per 128 x 128 block"),
]


@app.callback()
def _check(check: CheckOption = None) -> None:
    """Convert model weights between Hugging Face directories and Megatron checkpoints, one weight at a time.

    With --check DIR and no command: exit code 0 if the model is supported, else 1.
    """
    if check is None:
        return
    from .check import check as check_directory

    support = check_directory(check)
    typer.echo(f"{check}:\n{support}")
    raise typer.Exit(1 if support.missing else 0)


@app.command("hf-to-megatron")
def hf_to_megatron(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Hugging Face directory (safetensors; FP8 too)")],
    destination: Destination,
    tensor: Annotated[int, typer.Option(help="tensor-parallel ranks to write files for")] = 1,
    pipeline: Annotated[int, typer.Option(help="pipeline stages to write files for")] = 1,
    expert: Annotated[int, typer.Option(help="expert-parallel ranks to write files for")] = 1,
    expert_tensor: Annotated[int | None, typer.Option(help="tensor-parallel ranks of experts; default: tensor")] = None,
    dtype: DtypeOption = None,
    dry_run: DryRun = False,
    verify: Verify = False,
    resume: Resume = False,
    nproc: Processes = 1,
) -> None:
    """Hugging Face directory -> Megatron torch_dist checkpoint (weights only).

    The sizes decide the files, one for each rank that saves weights; the checkpoint loads at any sizes.
    """
    from .layout import TargetLayout
    from .to_megatron import ToMegatron

    layout = TargetLayout(tensor, pipeline, expert, expert_tensor)
    build = partial(ToMegatron, source, destination, layout, _torch_dtype(dtype))
    _convert(build, nproc, dry_run, resume, (source, destination) if verify else None)


@app.command("megatron-to-hf")
def megatron_to_hf(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Megatron checkpoint, a run's step or the run itself")],
    destination: Destination,
    template: Annotated[Path | None, typer.Option(help="has config.json and tokenizer; default: the run's")] = None,
    dtype: DtypeOption = None,
    quantization: QuantizationOption = None,
    shard_gb: ShardSize = 4.3,
    dry_run: DryRun = False,
    verify: Verify = False,
    resume: Resume = False,
    nproc: Processes = 1,
) -> None:
    """Megatron torch_dist checkpoint, saved in any layout -> complete Hugging Face directory."""
    from .files import checkpoint_at, template_for
    from .to_hf import ToHF

    checkpoint = checkpoint_at(source)
    options = _torch_dtype(dtype), quantization, int(shard_gb * 1e9)
    build = partial(ToHF, checkpoint, destination, template or template_for(checkpoint), *options)
    _convert(build, nproc, dry_run, resume, (destination, checkpoint) if verify else None)


@app.command("hf-to-hf")
def hf_to_hf(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Hugging Face directory (safetensors; FP8 too)")],
    destination: Destination,
    dtype: DtypeOption = None,
    quantization: QuantizationOption = None,
    shard_gb: ShardSize = 4.3,
    dry_run: DryRun = False,
    resume: Resume = False,
    nproc: Processes = 1,
) -> None:
    """Cast, quantise to FP8, dequantise from FP8 or divide a Hugging Face directory into other files."""
    from .to_hf import ToHF

    build = partial(ToHF, source, destination, source, _torch_dtype(dtype), quantization, int(shard_gb * 1e9))
    _convert(build, nproc, dry_run, resume, None)


@app.command("verify")
def verify_command(
    hf_dir: Annotated[Path, typer.Argument(metavar="HF", help="Hugging Face directory")],
    checkpoint: Annotated[
        Path, typer.Argument(metavar="MEGATRON", help="Megatron checkpoint, a run's step or the run")
    ],
) -> None:
    """Compare the logits of a Hugging Face directory and a Megatron checkpoint; name the first layer that differs."""
    from .files import checkpoint_at

    _verify(hf_dir, checkpoint_at(checkpoint))


def _convert(
    build: Callable[[], Conversion], nproc: int, dry_run: bool, resume: bool, to_verify: tuple[Path, Path] | None
) -> None:
    from .job import convert

    if dry_run:
        conversion = build()
        for line in conversion.table():
            typer.echo(line)
        typer.echo(f"{len(conversion.shards)} files, {conversion.nbytes / 1e6:,.1f} MB; nothing was written")
    else:
        converted = convert(build, resume=resume, processes=nproc)
        if converted is None:  # a rank that is not the first
            return
        conversion = converted
        typer.echo(f"{conversion.destination}: {len(conversion.shards)} files, {conversion.nbytes / 1e6:,.1f} MB")
    if count := conversion.config.mtp_layers:
        typer.echo(f"left out: {count} multi-token prediction layers; the config.json written names 0 of them")
    if to_verify is not None and not dry_run:
        _verify(*to_verify)


def _verify(hf_dir: Path, checkpoint: Path) -> None:
    from .verify import verify

    result = verify(hf_dir, checkpoint)
    if result.differs_at is not None:
        raise VerificationFailed(str(result))
    typer.echo(str(result))


def _torch_dtype(dtype: FloatName | None) -> torch.dtype | None:
    return None if dtype is None else DTYPES[dtype].torch
