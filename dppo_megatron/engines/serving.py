"""Define the interface of a kind of engine before a server runs, and how servers start on this machine.

The rules between settings use this file, so it imports torch only inside functions that need it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dppo_megatron.common.environment import cpu_threads
from dppo_megatron.config import Config
from dppo_megatron.run_dir import RunDir

from .guard.asgi import SECRET_VARIABLE

if TYPE_CHECKING:
    from dppo_megatron.hf import HFModelConfig

    from .byte_budget import ByteBudget
    from .protocol import Engine

Device = Literal["cpu", "cuda"]


class Node(NamedTuple):
    """Describes one node of an engine that spans several, with the address of node 0, which answers requests."""

    rank: int
    host: str
    port: int


class EngineKind(ABC):
    """Describes one kind of server. It serves every setting by default. A problem is `setting = value: why; remedy`."""

    secret_variables: tuple[str, ...] = (SECRET_VARIABLE,)  # environment variables that contain the run's secret
    own_receiver = False  # workers receive broadcast weights by our `WeightReceiver`, not by the server's own code
    install = ""  # how to get an environment that has the server; appended to the error about a missing package

    @abstractmethod
    def client(self, config: Config, url: str, budget: ByteBudget | None) -> Engine:
        """Return a client of the server at `url`, without opening a connection."""

    @abstractmethod
    def python(self, config: Config) -> Path:
        """Return the interpreter that runs the server."""

    @abstractmethod
    def command(self, config: Config, port: int, model: Path, version: int, node: Node | None = None) -> list[str]:
        """Return the command line of a server of policy `version`. `node` is None for an engine of one node."""

    @abstractmethod
    def environment(self, config: Config, version: int) -> dict[str, str]:
        """Return the variables to add to this process's own environment for the server."""

    @abstractmethod
    def update_bytes(self, module: int, bucket: int, config: Config) -> int:
        """Return the bytes that a GPU needs in addition to weights and cache while an update loads.

        `module` is the size of the largest unsharded module. `bucket` is the size of a broadcast bucket, 0 when weights
        are files.
        """

    @abstractmethod
    def lists_request(self, tokens: list[int], k: int) -> tuple[str, dict[str, Any]]:
        """Return the route and body of a request to a stock server for the K most likely tokens at every position."""

    @abstractmethod
    def decode_lists(self, reply: Any, tokens: list[int], k: int) -> tuple[list, list]:
        """Return the log-prob of each token after the first, and [(id, log-prob), ...] of the K most likely at each.

        Raises ValueError, KeyError, TypeError or IndexError if `reply` does not answer `lists_request`.
        """

    def problems(self, config: Config) -> list[str]:
        """Return why this kind cannot serve these settings."""
        return []

    def eval_problems(self, config: Config) -> list[str]:
        """Return why this kind cannot sample the sets of `eval`."""
        return []

    def model_problems(self, config: Config, hf: HFModelConfig) -> list[str]:
        """Return why this kind cannot serve the model with these settings."""
        return []

    def cpu_problems(self, config: Config) -> list[str]:
        """Return why this kind cannot serve these settings on a machine without GPUs."""
        return []

    def gpu_problems(self, config: Config) -> list[str]:
        """Return why this kind cannot serve these settings on GPUs."""
        return []

    def more_packages(self, config: Config, *, cuda: bool) -> dict[str, str]:
        """Return the packages that the interpreter needs besides the server, each with the problem if it is missing.

        `{python}` in a problem is replaced by the interpreter. `cuda` states whether the servers run on GPUs.
        """
        return {}

    def rank_environment(self, config: Config) -> dict[str, str]:
        """Return variables that trainer ranks need for a broadcast to this kind, unless the user has set them."""
        return {}

    def stage_layers(self, layers: int, stages: int) -> list[int]:
        """Return the number of layers of each pipeline stage."""
        return [layers]


CPU_MODULES = Path(__file__).parent / "cpu"  # has dppo_megatron.engines.cpu.absent_packages, for PYTHONPATH
CPU_KV_CACHE_BYTES = 2**30  # by default engines take a share of all memory, but other processes need it as well


def device_here() -> Device:
    """Return the device of servers that are started on this machine."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def server_threads(config: Config) -> dict[str, str]:
    """Return the variables for a server on CPUs, which it shares with the engines of its machine.

    Ranks compute at other times. `OMP_NUM_THREADS` in this process's environment is theirs, not the servers'.
    """
    engine, homes = config.engine, config.slurm.engine_nodes or config.slurm.trainer_nodes
    return cpu_threads(-(-engine.count // homes) * engine.devices_per_node, environment={})


def start_model(config: Config) -> Path:
    """Return `model.path`, or with `engine.quantization: fp8_block` the quantised copy in the run directory.

    `launch.quantized` makes the copy. An engine only takes weights in the format of the weights it started with.
    """
    from dppo_megatron.hf import read_hf_config

    if not config.engine.serves_fp8 or read_hf_config(config.model.path).quantization is not None:
        return config.model.path
    return RunDir(config.run.dir).quantized_start


def exact_environment(config: Config) -> dict[str, str]:
    """Return the variables for a server with `engine.exact`. Without this setting there are none."""
    if not config.engine.exact:
        return {}
    from dppo_megatron.hf import inverse_frequencies, padded_vocab_size, read_hf_config

    from .exact import Exact

    hf, ranks = read_hf_config(config.model.path), config.parallel.tensor
    return Exact(
        tensor=ranks,
        frequencies=tuple(inverse_frequencies(hf).tolist()),
        vocab_size=hf.vocab_size,
        shard_columns=padded_vocab_size(hf.vocab_size, ranks) // ranks,
        fp32_head=config.model.fp32_head,
    ).to_environment()
