"""Define the interface to a kind of engine before a server runs, and how servers start on this machine.

The rules between settings use this file, so torch is imported only inside functions that need it.
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
    """Describes a node of an engine with several nodes.

    Node 0 answers requests. `host` and `port` are where node 0 accepts the other nodes.
    """

    rank: int
    host: str
    port: int


class EngineKind(ABC):
    """Describes a kind of server. By default it serves every setting. A problem is `setting = value: why; remedy`."""

    package_version: str  # of the server; `internals.txt` lists the private names of this version that we use
    secret_variables: tuple[str, ...] = (SECRET_VARIABLE,)  # environment variables that contain the run's secret
    own_receiver = False  # whether workers receive broadcasts with our `WeightReceiver` instead of the server's code
    install = ""  # how to get an environment that has the server; appended to the error about a missing package

    @abstractmethod
    def client(self, config: Config, url: str, budget: ByteBudget | None) -> Engine:
        """Return a client for the server at `url`, without opening a connection."""

    @abstractmethod
    def python(self, config: Config) -> Path:
        """Return the interpreter that runs the server."""

    @abstractmethod
    def command(self, config: Config, port: int, model: Path, version: int, node: Node | None = None) -> list[str]:
        """Return the command line for a server with policy `version`. `node` is None for a single-node engine."""

    @abstractmethod
    def environment(self, config: Config, version: int) -> dict[str, str]:
        """Return the variables to add to this process's environment for the server."""

    @abstractmethod
    def update_bytes(self, module: int, bucket: int, config: Config) -> int:
        """Return how many bytes a GPU needs in addition to weights and cache while an update loads.

        module: bytes of the largest unsharded module.
        bucket: bytes of a broadcast bucket; 0 when weights are files.
        """

    @abstractmethod
    def lists_request(self, tokens: list[int], k: int) -> tuple[str, dict[str, Any]]:
        """Return the route and body that ask a stock server for the K most likely tokens at every position."""

    @abstractmethod
    def decode_lists(self, reply: Any, tokens: list[int], k: int) -> tuple[list, list]:
        """Decode the reply to `lists_request` into two lists, each with an entry for every token after the first.

        - the token's log-prob
        - [(id, log-prob), ...] of the K most likely tokens at that position

        Raises ValueError, KeyError, TypeError or IndexError for any other reply.
        """

    def problems(self, config: Config) -> list[str]:
        """Return why this kind cannot serve these settings."""
        return []

    def eval_problems(self, config: Config) -> list[str]:
        """Return why this kind cannot sample the `eval` sets."""
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

        `{python}` in a problem stands for the interpreter. `cuda` states whether the servers run on GPUs.
        """
        return {}

    def rank_environment(self, config: Config) -> dict[str, str]:
        """Return variables that trainer ranks need for a broadcast to this kind, unless the user has set them."""
        return {}

    def stage_layers(self, layers: int, stages: int) -> list[int]:
        """Return how many layers each pipeline stage has."""
        return [layers]


CPU_MODULES = Path(__file__).parent / "cpu"  # has dppo_megatron.rollout.engines.cpu.absent_packages, for PYTHONPATH
CPU_KV_CACHE_BYTES = 2**30  # by default engines take a share of all memory, but other processes need it as well


def device_here() -> Device:
    """Return the device for servers that start on this machine."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def server_threads(config: Config) -> dict[str, str]:
    """Return the variables for a server on CPUs, which it shares with the other engines on the machine.

    Ranks compute at other times. `OMP_NUM_THREADS` in this process's environment is for the ranks, not for servers.
    """
    engine, homes = config.engine, config.slurm.engine_nodes or config.slurm.trainer_nodes
    return cpu_threads(-(-engine.count // homes) * engine.devices_per_node, environment={})


def start_model(config: Config) -> Path:
    """Return `model.path`, or with `engine.quantization: fp8_block` the quantized copy in the run directory.

    `launch.quantized` makes the copy. An engine takes weights only in the format that it started with.
    """
    from dppo_megatron.hf import read_hf_config

    if not config.engine.serves_fp8 or read_hf_config(config.model.path).quantization is not None:
        return config.model.path
    return RunDir(config.run.dir).quantized_start


def exact_environment(config: Config) -> dict[str, str]:
    """Return the variables for a server with `engine.exact`, or no variables without this setting."""
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
