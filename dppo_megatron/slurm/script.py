"""The batch script of a run, from its config: what slurm/train.sbatch and train_hetjob.sbatch are, filled in."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from dppo_megatron.config import Config
from dppo_megatron.run_dir import RunDir


def batch_script(config: Config, *, resume: bool, directory: Path) -> str:
    """Text for sbatch. `directory` is where relative paths of the config begin."""
    s, run = config.slurm, RunDir(config.run.dir)
    output = (run.logs / "slurm-%j.out").absolute()
    once = [
        f"--job-name={config.run.dir.name}",
        f"--chdir={directory}",
        f"--output={output}",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{s.signal_lead_s}",
    ]
    if s.heterogeneous:
        trainers = _nodes(config, s.trainer_nodes, s.gpus_per_node, s.partition, s.sbatch_args)
        engine_partition = s.engine_partition or s.partition
        engines = _nodes(config, s.engine_nodes, s.serving_gpus_per_node, engine_partition, s.engine_sbatch_args)
        options = [*_lines([*once, *trainers]), "#SBATCH hetjob", *_lines(["--requeue", *engines])]
    else:
        nodes = s.trainer_nodes + s.engine_nodes
        options = _lines([*once, *_nodes(config, nodes, s.gpus_per_node, s.partition, s.sbatch_args)])
    arguments = ["-m", "dppo_megatron", "slurm-job", str(run.config), *(["--resume"] if resume else [])]
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            "# Written by `dppo-megatron slurm`; the settings are those of the config it names.",
            *options,
            "",
            "set -euo pipefail",
            *s.setup,
            f"exec {shlex.join([sys.executable, *arguments])}",
            "",
        ]
    )


def _nodes(config: Config, nodes: int, gpus: int, partition: str | None, more: tuple[str, ...]) -> list[str]:
    s = config.slurm
    return [
        *([f"--account={s.account}"] if s.account else []),
        *([f"--partition={partition}"] if partition else []),
        f"--nodes={nodes}",
        *([f"--gpus-per-node={gpus}"] if gpus else []),
        *(["--exclusive", "--mem=0"] if s.exclusive else []),
        f"--time={s.time}",
        *more,
    ]


def _lines(options: list[str]) -> list[str]:
    return [f"#SBATCH {option}" for option in options]
