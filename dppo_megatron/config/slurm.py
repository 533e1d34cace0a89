"""Defines the section `slurm`: a run's job, and the site's settings."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, model_validator

from .section import Count, CountFromZero, Processes, ProcessesFromZero, Seconds, Section, refusal, setting

_GRES = re.compile(r"(?:gpu:)?(?:((?=[^:]*[A-Za-z])[\w.+-]+):)?(\d{1,9})(?:\([^()]*\))?", re.ASCII)


def _written(pattern: str, form: str) -> AfterValidator:
    """Require a batch script value to match `pattern`, which the error describes as `form`."""

    def check(value: str) -> str:
        if not value.isprintable() or len(value.encode()) > 4000 or not re.fullmatch(pattern, value, re.ASCII):
            raise refusal(f"must be {form}")
        return value

    return AfterValidator(check)


Name = Annotated[str, _written(r"\w[\w.@+-]*", "one name of letters, digits and _ . @ + -")]
Names = Annotated[str, _written(r"\w[\w.,@+-]*", "names of letters, digits and _ . @ + -, joined by commas")]


def _in_words(value: object) -> object:
    if isinstance(value, int):
        raise refusal(f'would be {value} minutes for sbatch; write "{value}:00:00" for hours, or "{value}" for minutes')
    return value


_TIME = _written(r"(\d+-)?\d+(:\d+){0,2}|(?i:infinite|unlimited)", "as sbatch takes it, e.g. 24:00:00")
Time = Annotated[str, BeforeValidator(_in_words), _TIME]
_ONE = r"(?!.*\s--?[A-Za-z])"
# Other settings give these options to the script.
_OPTION = _ONE + r"(?!--(nodes|array|time|partition|account|output|signal)(=|$)|-[NatpAo])"
_OPTION += r"(--[a-z][a-z0-9-]*(=[^\"'\\]+)?|-[A-Za-z][^\s\"'\\#]*)"
_FORM = "one option without quotes that no other setting has, e.g. --qos=high or --comment=two words"
Option = Annotated[str, _written(_OPTION, _FORM)]
StepOption = Annotated[str, _written(_ONE + ".*", "one option; write each in an entry of its own")]
Word = Annotated[str, _written(r"\S+|[-/].*", "one word of a command; write each in an entry of its own")]


class SlurmConfig(Section):
    trainer_nodes: Processes = setting(1, "nodes over which parallel.world_size ranks are spread evenly")
    engine_nodes: ProcessesFromZero = setting(0, "nodes that only serve; 0 = engines share the trainer nodes")
    heterogeneous: bool = setting(False, "request trainer and engine nodes as a heterogeneous job")
    gpus_per_node: ProcessesFromZero = setting(8, "GPUs of each node, also as gpu:h100:8; 0 = run on the CPU")
    gpu_type: Name | None = setting(None, "their type in the cluster's GRES, e.g. h100; default: any")
    engine_gpus_per_node: ProcessesFromZero | None = setting(None, "GPUs of each engine node; default: gpus_per_node")
    engine_gpu_type: Name | None = setting(None, "type of these GPUs; default: gpu_type, unless their number is set")
    exclusive: bool = setting(True, "request whole nodes; false: give CPUs and memory in sbatch_args")
    gpu: str | None = setting(None, "kind of GPU, as for `plan`, e.g. h100-80; the run must fit")
    account: Name | None = setting(None, "account of the job, as sbatch takes it")
    partition: Names | None = setting(None, "partition of the job, as sbatch takes it")
    engine_partition: Names | None = setting(None, "partition of engine nodes; default: partition")
    time: Time = setting("24:00:00", "time limit of one attempt of the job, as sbatch takes it")
    signal_lead_s: Count = setting(300, "seconds before the time limit for a checkpoint and a requeue", ge=60, le=65535)
    max_restarts: CountFromZero = setting(3, "restarts in a row that may save no new checkpoint")
    preflight: bool = setting(True, "check nodes, GPUs and network before each attempt; exclude bad nodes")
    interface: str | None = setting(None, "network of NCCL, gloo and engines, e.g. ib0; default: host name's")
    bind: Literal["auto", "none"] = setting("auto", "auto: ranks and engines use the CPUs near their GPUs")
    setup: tuple[str, ...] = setting((), "shell lines before the program: modules, venv, exports")
    command: tuple[Word, ...] = setting(
        (), "command of this program, e.g. [apptainer, exec, --nv, X.sif, dppo-megatron]"
    )
    sbatch_args: tuple[Option, ...] = setting((), "further #SBATCH options, e.g. --qos=high")
    engine_sbatch_args: tuple[Option, ...] = setting((), "the same for a heterogeneous job's engine nodes")
    srun_args: tuple[StepOption, ...] = setting((), "further options of every srun, e.g. --container-image=...")
    start_timeout_s: Seconds = setting(600.0, "the job fails unless all ranks start in this time")

    @model_validator(mode="before")
    @classmethod
    def _gres(cls, tree: Any) -> Any:
        """Accept Slurm's notation: `gpu:h100:8(S:0-1)` means 8 GPUs of type h100."""
        for count, kind in (("gpus_per_node", "gpu_type"), ("engine_gpus_per_node", "engine_gpu_type")):
            value = tree.get(count) if isinstance(tree, dict) else None
            if isinstance(value, str) and (gres := _GRES.fullmatch(value)):
                tree = tree | {count: int(gres[2])} | ({kind: gres[1]} if gres[1] else {})
        return tree

    @property
    def serving_gpus_per_node(self) -> int:
        return self.gpus_per_node if self.engine_gpus_per_node is None else self.engine_gpus_per_node
