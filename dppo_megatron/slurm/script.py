"""Batch scripts from one template: of a run, from its config, and those of the repository's slurm/ for sites to edit.

`python -m dppo_megatron.slurm.script slurm` writes the latter into slurm/.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from dppo_megatron.config import Config
from dppo_megatron.config.schema import SlurmConfig
from dppo_megatron.run_dir import RunDir

_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """The nodes of a job, or of one component of a heterogeneous job."""

    name: str
    nodes: int
    nodes_setting: str  # what the number follows from; empty where it is fixed
    gpus_per_node: int
    gpus_setting: str
    time: str
    account: str | None = None
    partition: str | None = None
    partition_placeholder: str = "PARTITION"  # in the scripts of the repository
    exclusive: bool = True
    sbatch_args: tuple[str, ...] = ()


def batch_script(config: Config, *, resume: bool, directory: Path) -> str:
    """Text for sbatch. `directory` is where relative paths of the config begin."""
    run = RunDir(config.run.dir)
    arguments = ["-m", "dppo_megatron", "slurm-job", str(run.config), *(["--resume"] if resume else [])]
    return _render(
        "train.sbatch.j2",
        site=False,
        name=config.run.dir.name,
        directory=directory,
        output=(run.logs / "slurm-%j.out").absolute(),
        groups=_node_groups(config.slurm),
        requeues=True,
        signal_lead_s=config.slurm.signal_lead_s,
        setup=config.slurm.setup,
        command=shlex.join([sys.executable, *arguments]),
    )


def site_scripts() -> dict[str, str]:
    """File name -> text of every script in the repository's slurm/."""
    settings = SlurmConfig(trainer_nodes=2, engine_nodes=1)
    run = {"site": True, "directory": None, "requeues": True, "signal_lead_s": settings.signal_lead_s}
    once = {**run, "requeues": False, "output": "slurm-%j.out"}
    train = {**run, "name": "dppo", "output": "slurm-%j.out"}
    sweep = {**run, "name": "dppo-sweep", "output": "slurm-%A_%a.out"}
    one_node = _node_groups(SlurmConfig())
    serving = NodeGroup("", 1, "", settings.gpus_per_node, "at least engine.count x engine.tensor_parallel", "02:00:00")
    converting = NodeGroup("", 1, "", 0, "", "02:00:00")
    heterogeneous = settings.model_copy(update={"heterogeneous": True})
    return {
        file: _render(f"{template}.sbatch.j2", file=file, **values)
        for file, template, values in (
            ("train.sbatch", "train", {**train, "groups": _node_groups(settings)}),
            ("train_hetjob.sbatch", "train", {**train, "groups": _node_groups(heterogeneous)}),
            ("sweep.sbatch", "sweep", {**sweep, "groups": one_node}),
            ("eval.sbatch", "eval", {**once, "name": "dppo-eval", "groups": [serving]}),
            ("convert.sbatch", "convert", {**once, "name": "dppo-convert", "groups": [converting]}),
        )
    }


def _node_groups(s: SlurmConfig) -> list[NodeGroup]:
    """Trainer nodes and engine nodes, as one group unless the job is heterogeneous."""
    common = {"time": s.time, "account": s.account, "exclusive": s.exclusive}
    trainers = {"partition": s.partition, "sbatch_args": s.sbatch_args, **common}
    gpus = (s.gpus_per_node, "slurm.gpus_per_node")
    if not s.heterogeneous:
        both = "slurm.trainer_nodes + slurm.engine_nodes"
        return [NodeGroup("", s.trainer_nodes + s.engine_nodes, both, *gpus, **trainers)]
    return [
        NodeGroup("trainer nodes", s.trainer_nodes, "slurm.trainer_nodes", *gpus, **trainers),
        NodeGroup(
            "engine nodes",
            s.engine_nodes,
            "slurm.engine_nodes",
            s.serving_gpus_per_node,
            "slurm.engine_gpus_per_node",
            partition=s.engine_partition or s.partition,
            partition_placeholder="ENGINE_PARTITION",
            sbatch_args=s.engine_sbatch_args,
            **common,
        ),
    ]


def _render(template: str, **values: Any) -> str:
    return _TEMPLATES.get_template(template).render(values)


if __name__ == "__main__":
    for name, text in site_scripts().items():
        (Path(sys.argv[1]) / name).write_text(text)
