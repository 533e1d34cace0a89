"""Computes the environment variables that must be set before a trainer rank starts."""

from __future__ import annotations

import os
import subprocess

from dppo_megatron.config import Config
from dppo_megatron.rollout.engines.kinds import kind_of
from dppo_megatron.run_dir import RunDir


def torchrun_environment(
    rank: int, size: int, local_rank: int, local_size: int, host: str, port: int
) -> dict[str, str]:
    """Return the variables with which torchrun starts a rank. All ranks meet at `host` and `port`."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return dict(zip(names, map(str, (rank, size, local_rank, local_size, host, port)), strict=True))


def trace_environment(run: RunDir) -> dict[str, str]:
    """Return the variables that make every rank dump the last collectives to RUN/logs if a collective times out."""
    dumps = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_DUMP_TEMP_FILE": f"{run.flight_recorder.absolute()}"}
    return {name: value for name, value in dumps.items() if name not in os.environ}


def connection_environment(config: Config) -> dict[str, str]:
    """Return the variables for CUDA's queues and broadcasts to engines, without variables that are already set."""
    variables = kind_of(config).rank_environment(config) if config.samples else {}
    return _hardware_queues(config) | {name: value for name, value in variables.items() if name not in os.environ}


def _hardware_queues(config: Config) -> dict[str, str]:
    """Return `CUDA_DEVICE_MAX_CONNECTIONS=1` where Megatron-LM requires it (arguments.py, validate_args).

    Megatron-LM requires this with tensor or context parallelism on GPUs before Blackwell. With one hardware queue,
    kernels start in launch order. Megatron's layers rely on this order (tensor_parallel/layers.py): a collective
    launched before a matrix product overlaps with the product, instead of waiting after it for free multiprocessors.
    """
    parallel = config.parallel.tensor > 1 or config.parallel.context > 1
    if not parallel or "CUDA_DEVICE_MAX_CONNECTIONS" in os.environ or (_oldest_gpu() or 0.0) >= 10.0:
        return {}
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def _oldest_gpu() -> float | None:
    """Return the lowest compute capability of this machine's GPUs, or None if nvidia-smi does not report it.

    Does not use torch, because torch would open a context on the ranks' first GPU.
    """
    try:
        return min((float(capability) for (capability,) in nvidia_smi("compute_cap")), default=None)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def nvidia_smi(fields: str, timeout_s: float = 30.0) -> list[list[str]]:
    """Return the `fields` of each GPU that this process may use, e.g. [["0", "GPU-8f"], ["1", "GPU-3c"]].

    Raises OSError if nvidia-smi is not installed, subprocess.SubprocessError if it fails or takes too long.
    """
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True).stdout
    return [[cell.strip() for cell in line.split(",")] for line in answer.splitlines()]
