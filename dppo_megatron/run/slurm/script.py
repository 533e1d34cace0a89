"""Writes batch scripts from a base template: a run's script, and the examples in slurm/ that a site edits.

`python -m dppo_megatron.run.slurm.script slurm` writes the examples.
"""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2

from dppo_megatron.config import Config, ConfigError
from dppo_megatron.config.slurm import SlurmConfig
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
    """Describes the nodes in a job, or in a component of a heterogeneous job."""

    name: str
    nodes: int
    nodes_setting: str  # setting that contains the number; empty if it is fixed
    gpus_per_node: str  # 8 or h100:8; empty without GPUs
    gpus_setting: str
    partition: str | None = None
    partition_placeholder: str = "PARTITION"  # used in the repository's scripts
    sbatch_args: tuple[str, ...] = ()


def batch_script(config: Config, *, resume: bool, directory: Path) -> str:
    """Return the script for sbatch. Relative paths in the config begin at `directory`.

    Raises `ConfigError` for a path that sbatch would read as another path.
    """
    run = RunDir(config.run.dir)
    if not str(directory).isprintable() or "\\" in str(run.logs.absolute()):  # Slurm would keep %j unchanged
        place = f"run.dir = {run.root}, working directory = {directory}"
        raise ConfigError("batch script", [f"{place}: contains a line break or backslash; choose another"])
    command = [sys.executable, "-m", "dppo_megatron", "slurm-job", str(run.config), *(["--resume"] if resume else [])]
    output = str(run.logs.absolute()).replace("%", "%%") + "/slurm-%j.out"
    values = {"site": False, "directory": directory, "output": output, "command": shlex.join(command)}
    return _script("train", config.run.dir.name, config.slurm, **values)


def site_scripts() -> dict[str, str]:
    """Return file name -> text for every script in the repository's slurm/."""
    three_nodes = SlurmConfig(trainer_nodes=2, engine_nodes=1)
    two_kinds = SlurmConfig(trainer_nodes=2, engine_nodes=1, heterogeneous=True)
    short = SlurmConfig(time="02:00:00")
    serving = [NodeGroup("", 1, "", "8", "engine.count is lowered to as many engines as fit")]
    converting = [NodeGroup("", 1, "", "", "")]
    return {
        "train.sbatch": _script("train", "dppo", three_nodes, file="train.sbatch"),
        "train_hetjob.sbatch": _script("train", "dppo", two_kinds, file="train_hetjob.sbatch"),
        "sweep.sbatch": _script("sweep", "dppo-sweep", SlurmConfig(), output="slurm-%A_%a.out"),
        "eval.sbatch": _script("eval", "dppo-eval", short, groups=serving, requeues=False),
        "convert.sbatch": _script("convert", "dppo-convert", short, groups=converting, requeues=False),
    }


def _script(template: str, name: str, slurm: SlurmConfig, **values: Any) -> str:
    """Fill a template. `values` adds to the defaults, which suit a site's script, or replaces them."""
    defaults = {"site": True, "directory": None, "output": "slurm-%j.out", "requeues": True}
    values = {"name": name, "slurm": slurm, "groups": _node_groups(slurm), **defaults, **values}
    return _TEMPLATES.get_template(f"{template}.sbatch.j2").render(values)


def _node_groups(s: SlurmConfig) -> list[NodeGroup]:
    """Return trainer nodes and engine nodes, in a single group unless the job is heterogeneous."""
    trainers = NodeGroup(
        name="trainer nodes",
        nodes=s.trainer_nodes,
        nodes_setting="slurm.trainer_nodes",
        gpus_per_node=_gpus(s.gpus_per_node, s.gpu_type),
        gpus_setting="slurm.gpus_per_node",
        partition=s.partition,
        sbatch_args=s.sbatch_args,
    )
    if not s.heterogeneous:
        nodes, setting = s.trainer_nodes + s.engine_nodes, "slurm.trainer_nodes + slurm.engine_nodes"
        return [replace(trainers, nodes=nodes, nodes_setting=setting)]
    engine_type = s.engine_gpu_type or (s.gpu_type if s.engine_gpus_per_node is None else None)
    engines = NodeGroup(
        name="engine nodes",
        nodes=s.engine_nodes,
        nodes_setting="slurm.engine_nodes",
        gpus_per_node=_gpus(s.serving_gpus_per_node, engine_type),
        gpus_setting="slurm.engine_gpus_per_node",
        partition=s.engine_partition or s.partition,
        partition_placeholder="ENGINE_PARTITION",
        sbatch_args=s.engine_sbatch_args,
    )
    return [trainers, engines]


def _gpus(count: int, kind: str | None) -> str:
    return f"{kind}:{count}" if kind and count else str(count or "")


def _word(option: str) -> str:
    """Quote `--name=value` as a single word on an #SBATCH line.

    sbatch interprets blanks, `#`, quotes and backslashes in a value.
    """
    name, equals, value = option.partition("=")
    if re.fullmatch(r"[\w.,:;@%+=/-]*", value, re.ASCII):
        return option
    return name + equals + '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


_TEMPLATES.filters["word"] = _word


if __name__ == "__main__":
    for name, text in site_scripts().items():
        (Path(sys.argv[1]) / name).write_text(text)
