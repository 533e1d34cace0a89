"""`slurm`: the job of a run, and what its site needs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .section import Count, CountFromZero, Processes, ProcessesFromZero, Seconds, Section


class SlurmConfig(Section):
    trainer_nodes: Processes = Field(1, description="nodes over which parallel.world_size ranks are spread evenly")
    engine_nodes: ProcessesFromZero = Field(
        0, description="nodes that only serve; 0 = engines share the trainer nodes, on the GPUs after the ranks'"
    )
    heterogeneous: bool = Field(
        False, description="request trainer nodes and engine nodes as two components of a heterogeneous job"
    )
    gpus_per_node: ProcessesFromZero = Field(
        8, description="GPUs requested on each node; 0 = none, the run is on the CPU"
    )
    engine_gpus_per_node: ProcessesFromZero | None = Field(
        None, description="GPUs of an engine node of a heterogeneous job; default: gpus_per_node"
    )
    exclusive: bool = Field(True, description="request whole nodes; false: give CPUs and memory in sbatch_args")
    gpu: str | None = Field(
        None,
        description="kind of GPU as `dppo-megatron plan` names it, e.g. h100-80; a run that does not fit is refused",
    )
    account: str | None = None
    partition: str | None = None
    engine_partition: str | None = Field(
        None, description="partition of the engine nodes of a heterogeneous job; default: partition"
    )
    time: str = Field("24:00:00", description="time limit of one attempt of the job, as sbatch takes it")
    signal_lead_s: Count = Field(
        300, ge=60, description="seconds before the time limit at which the run checkpoints and requeues"
    )
    max_restarts: CountFromZero = Field(
        3, description="restarts in a row that may save no new checkpoint; one more ends the job"
    )
    preflight: bool = Field(True, description="check nodes, GPUs and network before each attempt; exclude bad nodes")
    interface: str | None = Field(
        None, description="network interface of NCCL, gloo and the engines, e.g. ib0; default: the host name's"
    )
    bind: Literal["auto", "none"] = Field(
        "auto", description="auto: ranks and engines run on the CPUs near their GPUs, where these can be read"
    )
    setup: tuple[str, ...] = Field((), description="shell lines before the program: modules, venv, exports")
    command: tuple[str, ...] = Field(
        (),
        description="how a step starts this program, e.g. [apptainer, exec, --nv, /images/dppo.sif, dppo-megatron]; "
        "default: the interpreter that drives the job",
    )
    sbatch_args: tuple[str, ...] = Field((), description="further #SBATCH options, e.g. --qos=high")
    engine_sbatch_args: tuple[str, ...] = Field((), description="the same for a heterogeneous job's engine nodes")
    srun_args: tuple[str, ...] = Field((), description="further options of every srun, e.g. --container-image=...")
    start_timeout_s: Seconds = Field(600.0, description="ranks that have not all started after this fail the job")

    @property
    def serving_gpus_per_node(self) -> int:
        return self.gpus_per_node if self.engine_gpus_per_node is None else self.engine_gpus_per_node
