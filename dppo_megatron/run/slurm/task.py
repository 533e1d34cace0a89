"""`dppo-megatron slurm-task`: runs a task in a job step, and translates Slurm's environment for the program."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from dppo_megatron.common.environment import cpu_threads
from dppo_megatron.common.files import write_json
from dppo_megatron.common.process import Child, exit_reason
from dppo_megatron.config import Config
from dppo_megatron.errors import ExpectedError
from dppo_megatron.report.logs import last_lines
from dppo_megatron.rollout.fleet.registry import engine_log, free_port, read_when_written
from dppo_megatron.run.checks import load_config
from dppo_megatron.run.checks.devices import visible_devices
from dppo_megatron.run.launch.local_processes import dppo_command
from dppo_megatron.run.launch.rank_environment import connection_environment, torchrun_environment, trace_environment
from dppo_megatron.run.preflight.task import ProcessPlace, run_place
from dppo_megatron.run_dir import RunDir

from .binding import bind_to_gpus

LOOPBACK = "127.0.0.1"
POLL_S = 0.1
GRACE_S = 5.0
LAST_LINES = 12


@dataclass(frozen=True, slots=True)
class MasterAddress:
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Task:
    """Describes this process's position in the job step."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: str
    step: str  # unique across all jobs, attempts and steps

    @classmethod
    def current(cls, environment: Mapping[str, str] = os.environ) -> Task:
        """Return the task from the environment. Raises `ExpectedError` outside a job step."""
        try:
            size, nodes = int(environment["SLURM_NTASKS"]), int(environment["SLURM_STEP_NUM_NODES"])
            return cls(
                rank=int(environment["SLURM_PROCID"]),
                size=size,
                local_rank=int(environment["SLURM_LOCALID"]),
                local_size=size // nodes,
                node=environment["SLURMD_NODENAME"],
                step=f"{environment['SLURM_JOB_ID']}.{environment['SLURM_STEP_ID']}"
                f"-{environment.get('SLURM_RESTART_COUNT', '0')}",
            )
        except KeyError as missing:
            raise ExpectedError(
                f"{missing.args[0]} is not set: only the job's driver may start this command, by srun"
            ) from None


def run_task(role: str, config_file: Path, *, resume: bool, index: int, first_gpu: int) -> int:
    """Run a trainer rank, the orchestrator, engine `index` or the config check; return the exit code.

    All but the check run as a child with a separate session and log file. SIGUSR1 reaches the child as SIGTERM, because
    srun forwards SIGUSR1 but kills all tasks on SIGTERM.
    """
    # srun signals every process in the step, including checkpoint writers and server workers. They inherit the mask, so
    # only this process receives the signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    config = load_config(config_file)
    if role == "check":
        from .submit import check_config

        for note in check_config(config, str(config_file), place="node"):
            print(note)
        return 0
    task, run, address = Task.current(), RunDir(config.run.dir), node_address(config)
    binds = config.slurm.bind == "auto"
    environment = interface_environment(config) | kernel_cache_environment()
    if role == "trainer":
        name, arguments = f"trainer-{task.rank}", ["trainer", *(["--resume"] if resume else [])]
        arguments += ["--needs-gpu"] if config.slurm.gpus_per_node else []
        bound = binds and bind_to_gpus(name, task.local_rank, 1, task.local_size)
        place = rendezvous(run, task, address, config.slurm.start_timeout_s)
        environment |= connection_environment(config) | trainer_environment(run, task, place, bound=bound)
    elif role == "engine":
        host = engine_host(config, address)
        name = engine_log(index, task.rank)
        arguments = ["engine", "--index", str(index), "--set", f"engine.host={host}"]
        if task.size > 1:
            arguments += ["--node", str(task.rank), "--meeting", f"engine-{index}-{task.step}"]
        if binds:
            bind_to_gpus(name, first_gpu, config.engine.devices_per_node, 1)
        environment |= engine_environment(config, index, first_gpu)
    else:
        name, arguments = role, [role]
    child = Child(name, dppo_command(*arguments, str(config_file)), run.log(name), environment)
    return _wait_and_report(child, task)


def run_preflight_task(config_file: Path, meeting: str, first_gpu: int, *, serves: bool) -> int:
    """Run a preflight process, see `run_place`. The address is loopback if rank 0 has the loopback address."""

    def address(config: Config) -> str:
        os.environ.update(interface_environment(config))
        return LOOPBACK if meeting.startswith(LOOPBACK) else node_address(config)

    task = Task.current()
    gpu = first_gpu if serves else task.local_rank
    return run_place(config_file, ProcessPlace(task.rank, gpu, task.local_size, task.node, meeting, serves), address)


def _wait_and_report(child: Child, task: Task) -> int:
    """Return the child's exit code, or 128 + n if signal n ended it. Print the last log lines if the child failed.

    The lines go to the job's output. The code is 0 for a child that this process ended by a signal. srun returns the
    largest task exit code. That must be the failed rank's code, not the code of a rank that was ended afterwards.
    """
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True
        child.signal(signal.SIGTERM)

    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    while (code := child.poll()) is None:
        time.sleep(POLL_S)
    child.end(GRACE_S)  # processes that the child left running
    if stopped and code in (-signal.SIGTERM, 128 + signal.SIGTERM):
        return 0
    if code:
        lines = "".join(f"  {line}\n" for line in last_lines(child.log, LAST_LINES))
        print(f"{child.name} on {task.node}: {exit_reason(code)}; the end of {child.log}:\n{lines}", end="", flush=True)
    return code if code >= 0 else 128 - code


def trainer_environment(run: RunDir, task: Task, place: MasterAddress, *, bound: bool) -> dict[str, str]:
    """Return torchrun's variables, and variables that make every rank dump a trace if a collective times out.

    If `bound`, this process's CPUs belong only to this rank. Otherwise all ranks on the node share the CPUs.
    """
    variables = torchrun_environment(task.rank, task.size, task.local_rank, task.local_size, place.host, place.port)
    return trace_environment(run) | cpu_threads(1 if bound else task.local_size) | variables


def engine_environment(config: Config, index: int, first_gpu: int) -> dict[str, str]:
    """Return the variable that selects the engine's GPUs among the step's GPUs."""
    environment: dict[str, str] = {}
    named = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    if visible := named or visible_devices():
        count = config.engine.devices_per_node
        if first_gpu + count > len(visible):
            raise ExpectedError(
                f"engine-{index}: its GPUs are {first_gpu} to {first_gpu + count - 1} of its node, and Slurm shows the "
                f"step {len(visible)}; make slurm.gpus_per_node and the job agree, and remove options from "
                "slurm.srun_args that bind GPUs to tasks (--gpus-per-task, --gpu-bind): an engine needs to see all"
            )
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible[first_gpu : first_gpu + count])
    return environment


def rendezvous(run: RunDir, task: Task, address: str, timeout_s: float) -> MasterAddress:
    """Return host and port of the ranks' rendezvous.

    Rank 0 chooses a free port on this node and writes it to a file in the run directory, where the other ranks read it.
    Each job step has a separate file, so no rank reads an earlier attempt's file. Raises `ServiceTimeout` naming
    rank 0's log if the file is not written in time.
    """
    path = run.services / f"trainers-{task.step}.json"
    if task.rank == 0:
        write_json(path, asdict(MasterAddress(address, free_port(address))))
    return read_when_written(MasterAddress, path, timeout_s, "slurm.start_timeout_s", run.log("trainer-0"))


def node_address(config: Config) -> str:
    """Return this node's IPv4 address for other nodes, from `slurm.interface` or the host name."""
    name = config.slurm.interface
    if name is None:
        address = socket.gethostbyname(socket.gethostname())
        nodes = config.slurm.trainer_nodes + config.slurm.engine_nodes
        if address.startswith("127.") and nodes > 1:
            raise ExpectedError(
                f"slurm.interface: not set, and {socket.gethostname()} resolves to {address} on itself, which other "
                f"nodes cannot reach; name one of {', '.join(psutil.net_if_addrs())}"
            )
        return address
    addresses = [a.address for a in psutil.net_if_addrs().get(name, ()) if a.family == socket.AF_INET]
    if not addresses:
        raise ExpectedError(
            f"slurm.interface = {name}: no such interface with an IPv4 address on {socket.gethostname()}; it has "
            f"{', '.join(psutil.net_if_addrs())}"
        )
    return addresses[0]


def engine_host(config: Config, address: str) -> str:
    """Return the address for engines: the node's `address` if the run has several nodes, else loopback."""
    return address if config.slurm.trainer_nodes + config.slurm.engine_nodes > 1 else "127.0.0.1"


def interface_environment(config: Config) -> dict[str, str]:
    """Return the network interface variables for NCCL and gloo, without variables that are already set."""
    interface, names = config.slurm.interface, ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    return {name: interface for name in names if name not in os.environ} if interface else {}


def kernel_cache_environment() -> dict[str, str]:
    """Return the variable that puts compiled kernels into a directory on the node's disk, unless it is already set.

    The job's processes and attempts on the node all share the directory. Nodes that compile into a shared home
    directory overwrite each other's files.
    """
    directory = Path(tempfile.gettempdir()) / f"triton-{os.getuid()}-{os.environ['SLURM_JOB_ID']}"
    return {} if "TRITON_CACHE_DIR" in os.environ else {"TRITON_CACHE_DIR": str(directory)}
