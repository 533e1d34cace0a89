"""`dppo-megatron slurm`: checks a config, writes a batch script and submits it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dppo_megatron.config import Config, ConfigError, read_config, save_resolved, validated, with_absolute_paths
from dppo_megatron.errors import ExpectedError
from dppo_megatron.run.checks import Place, check_job, preflight
from dppo_megatron.run_dir import RunDir

from . import queue
from .attempts import AttemptLog
from .script import batch_script


class StillQueued(ExpectedError, RuntimeError):
    """Raised when another job of this run waits or runs."""


@dataclass(frozen=True, slots=True)
class Prepared:
    config: Config
    script: str
    notes: list[str]  # the method in words, the data


def prepare(
    config_file: Path, overrides: Sequence[str], nodes: str | None, *, resume: bool, place: Place = "elsewhere"
) -> Prepared:
    """Check the config and make the batch script. `place`: see `preflight`. Raises `ConfigError` with all problems."""
    config = with_absolute_paths(read_config(config_file, overrides))
    if nodes is not None:
        config = scale_to_nodes(config, nodes)
    notes = check_job(config, str(config_file), resume=resume)
    if nodes is not None and (engines := config.slurm.engine_nodes):
        notes.append(f"--nodes {nodes}: {config.slurm.trainer_nodes} nodes of the trainer, and {engines} of engines")
    if config.slurm.command:  # only that command's environment can check model, data and plan
        notes += ["slurm.command is set: the job checks model, data, reward and plan when it starts, with that command"]
    else:
        notes += check_config(config, str(config_file), place=place)
    return Prepared(config, batch_script(config, resume=resume, directory=Path.cwd()), notes)


def check_config(config: Config, source: str, *, place: Place) -> list[str]:
    """Return the notes of `preflight` and the plan, or a note that there is no plan without `slurm.gpu`.

    Raises `ConfigError` with every violation.
    """
    notes = preflight(config, source, place=place)
    if config.slurm.gpu is not None and (place != "unstaged" or (config.model.path / "config.json").exists()):
        notes.append(check_memory(config, config.slurm.gpu, source))
    elif config.slurm.gpus_per_node and config.slurm.gpu is None:
        notes.append("slurm.gpu is not set: the GPUs' memory was not checked; set it to their kind, e.g. h100-80")
    return notes


def check_memory(config: Config, gpu: str, source: str) -> str:
    """Return the plan for running on GPUs of kind `gpu`, as text.

    Raises `ConfigError` with the necessary changes if the run does not fit.
    """
    from dppo_megatron.run.plan import Cluster, RankBuilder, advise, hardware, make_plan, report

    s = config.slurm
    cluster = Cluster(s.trainer_nodes + s.engine_nodes, s.gpus_per_node, hardware(gpu, "slurm.gpu"))
    with RankBuilder() as builder:
        plan = make_plan(config, cluster, builder, source=source)
        if not plan.fits:
            raise ConfigError(source, [f"slurm.gpu = {gpu}: does not fit\n{report(plan, advise(plan, builder))}"])
        return report(plan, [])


def submit(prepared: Prepared) -> tuple[str, Path]:
    """Write script and resolved config into the run directory and submit the job; return job id and script path.

    The job trains the config that was checked here, even if the file changes while it waits in the queue.
    """
    run = RunDir(prepared.config.run.dir)
    attempts = AttemptLog(run)
    refuse_second_job(run)
    run.make()
    run.logs.mkdir(exist_ok=True)  # Slurm does not create the directory of its output
    save_resolved(prepared.config, run.config)
    script = run.root / "train.sbatch"
    script.write_text(prepared.script)
    job = queue.submit(script)
    attempts.record("submitted", "dppo-megatron slurm", job=job, restart=0)
    return job, script


def refuse_second_job(run: RunDir, job_id: str | None = None) -> None:
    """Raise `StillQueued` if another job of this run waits or runs.

    Two jobs would overwrite each other's files in the run directory.
    """
    other_ids = sorted({event.job for event in AttemptLog(run).events()} - {job_id})
    if waiting := [job for job in queue.jobs(other_ids) if job.state != "COMPLETING"]:
        raise StillQueued(
            f"run.dir = {run.root}: job {waiting[0].id} of this run is {waiting[0].state}; `scancel {waiting[0].id}` "
            "ends it; for a different run choose another run.dir"
        )


def scale_to_nodes(config: Config, nodes: str) -> Config:
    """Return the config for `TRAINERS` or `TRAINERS+ENGINES` nodes, with ranks and engines per node as before.

    Raises `ConfigError` if `nodes` is not one or two numbers, or if it requests engine nodes and the config has none.
    """
    trainers, plus, engines = nodes.partition("+")
    if not trainers.isdecimal() or int(trainers) < 1 or (plus and not engines.isdecimal()):
        raise ConfigError("--nodes", [f"{nodes}: write TRAINERS or TRAINERS+ENGINES, e.g. 4 or 4+2"])
    s, count = config.slurm, config.engine.count
    ranks = config.parallel.world_size // s.trainer_nodes
    engine_nodes = int(engines) if plus else s.engine_nodes
    if engine_nodes and not s.engine_nodes:
        raise ConfigError("--nodes", [f"{nodes}: the config has slurm.engine_nodes = 0; set it and engine.count"])
    if s.engine_nodes and engine_nodes:
        count = count * engine_nodes // s.engine_nodes
    elif not s.engine_nodes:
        count = count * int(trainers) // s.trainer_nodes
    tree = config.model_dump()
    tree["slurm"] |= {"trainer_nodes": int(trainers), "engine_nodes": engine_nodes}
    tree["parallel"]["world_size"] = ranks * int(trainers)
    tree["engine"]["count"] = count
    return validated(tree, "--nodes")
