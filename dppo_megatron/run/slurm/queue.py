"""Runs Slurm's commands, each with a timeout and an error that names the command and Slurm's answer."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dppo_megatron.common.retry import RetryBudget, retry
from dppo_megatron.errors import ExpectedError

COMMAND_TIMEOUT_S = 60.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
# These slurmctld answers are final. After any other answer (restarting, busy, unreachable), a retry may succeed.
_REFUSAL = re.compile(
    r"invalid (job|user|partition|account)|permission denied|disabled|not supported|only batch jobs|already complet"
    r"|pending execution",
    re.IGNORECASE,
)


class SlurmError(ExpectedError, RuntimeError):
    """Raised when Slurm is absent, did not answer, or refused."""


class SlurmRefused(SlurmError):
    """Raised when Slurm refused the command, or is not installed. A retry would not help."""


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """Contains a squeue line. A heterogeneous job has a line per component."""

    id: str  # 12, 12+1 for a component, 12_3 for an array task
    name: str
    state: str  # PENDING, RUNNING, COMPLETING, ...
    reason: str  # why the job waits, or "None"
    nodes: str
    time_left: str


_FORMAT = "%i|%j|%T|%r|%N|%L"


def submit(script: Path) -> str:
    """Submit the script with sbatch and return the job id."""
    return slurm_command("sbatch", "--parsable", str(script)).split(";")[0]


def jobs(job_ids: list[str]) -> list[QueuedJob]:
    """Return the jobs that are in the queue. Slurm removes a job from the queue some minutes after it ends."""
    if not job_ids:
        return []
    try:
        lines = slurm_command("squeue", "--noheader", f"--format={_FORMAT}", "--jobs", ",".join(job_ids)).splitlines()
    except SlurmError as error:
        if "Invalid job id" in str(error):  # squeue's answer if none is in the queue any more
            return []
        raise
    parted = (line.partition("|") for line in lines)  # the name, which comes next, may contain any character
    return [QueuedJob(job.strip(), *map(str.strip, fields.rsplit("|", 4))) for job, _, fields in parted]


def requeue(job_id: str) -> None:
    """Terminate this attempt's steps and batch script, and queue the job again."""
    slurm_command("scontrol", "requeue", job_id)


def exclude(job_id: str, nodes: Sequence[str]) -> None:
    """Exclude `nodes` from a waiting job, in addition to the nodes that are already excluded."""
    match = re.search(r"ExcNodeList=(\S+)", slurm_command("scontrol", "show", "job", "--oneliner", job_id))
    names = [*nodes, *([match[1]] if match and match[1] != "(null)" else [])]
    slurm_command("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={','.join(names)}")


def retry_until_answered(
    command: Callable[[], None], timeout_s: float, give_up: Callable[[], bool] | None = None
) -> None:
    """Repeat `command`, after growing pauses, while Slurm does not answer.

    Raises `SlurmRefused` at once, and the last `SlurmError` after `timeout_s` or when `give_up` returns True.
    """
    budget = RetryBudget(timeout_s=timeout_s, first_pause_s=FIRST_PAUSE_S, longest_pause_s=LONGEST_PAUSE_S, jitter=True)
    retry(lambda _attempt: command(), budget, on=SlurmError, unless=SlurmRefused, give_up=give_up)


def node_names(node_list: str) -> tuple[str, ...]:
    """Expand a node list, `node[1-2]` -> node1, node2, in the order in which srun numbers tasks."""
    return tuple(slurm_command("scontrol", "show", "hostnames", node_list).split())


def slurm_command(*command: str) -> str:
    """Return the standard output. Raises `SlurmError` with the command's output, or `SlurmRefused` if that is final."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    except FileNotFoundError:
        raise SlurmRefused(f"{command[0]}: not found; this needs a machine with Slurm's commands") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{' '.join(command)}: no answer within {COMMAND_TIMEOUT_S:.0f} s") from None
    if result.returncode:
        answer = (result.stderr or result.stdout).strip()
        kind = SlurmRefused if _REFUSAL.search(answer) else SlurmError
        raise kind(f"{' '.join(command)}: {answer}")
    return result.stdout.strip()
