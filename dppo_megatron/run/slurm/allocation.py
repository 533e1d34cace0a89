"""Reads this job's allocation: job id, number of restarts, and the nodes in each component."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from .queue import SlurmError, node_names


@dataclass(frozen=True, slots=True)
class Allocation:
    job_id: str  # "12", or "12_3" for an array task, because one array task's id is the array number
    restart: int  # number of times that Slurm or the job itself requeued it
    groups: tuple[tuple[str, ...], ...]  # node names by component; only a heterogeneous job has several
    gpus: int | None = None  # granted on this node, the job's first; None if Slurm counts no GPUs

    @property
    def heterogeneous(self) -> bool:
        return len(self.groups) > 1

    @property
    def components(self) -> tuple[str, ...]:
        """Return the names of all job components for scontrol."""
        return tuple(f"{self.job_id}+{i}" for i in range(len(self.groups))) if self.heterogeneous else (self.job_id,)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of nodes in each component."""
        return tuple(len(nodes) for nodes in self.groups)

    @classmethod
    def current(cls, environment: Mapping[str, str] = os.environ) -> Allocation:
        """Return the allocation in the batch script's environment. Raises `SlurmError` outside a job."""
        if "SLURM_JOB_ID" not in environment:
            raise SlurmError(
                "SLURM_JOB_ID is not set: only a batch script runs this command; submit one with `dppo-megatron slurm "
                "CONFIG` or `sbatch slurm/train.sbatch CONFIG`"
            )
        size = int(environment.get("SLURM_HET_SIZE", "1"))
        parts = [f"_HET_GROUP_{i}" for i in range(size)] if size > 1 else [""]
        count, ids = environment.get("SLURM_GPUS_ON_NODE", ""), environment.get("SLURM_JOB_GPUS", "")
        return cls(
            job_id=_job_id(environment),
            restart=int(environment.get("SLURM_RESTART_COUNT", "0")),
            groups=tuple(node_names(environment[f"SLURM_JOB_NODELIST{part}"]) for part in parts),
            gpus=int(count) if count.isdecimal() else len(ids.split(",")) if ids else None,
        )


def _job_id(environment: Mapping[str, str]) -> str:
    if "SLURM_ARRAY_JOB_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment["SLURM_JOB_ID"]
