"""A config and a machine to a plan, or to every reason why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dppo_megatron.checks import cluster as cluster_rules
from dppo_megatron.checks import serving, settings_problems
from dppo_megatron.checks.cluster import devices_needed
from dppo_megatron.checks.model import on_any_machine
from dppo_megatron.config import Config, ConfigError
from dppo_megatron.hf import HFModelConfig, ModelError, read_hf_config

from .cluster import Cluster
from .engines import EngineMemory, engine_memory
from .memory import Load, Memory, estimate, largest_load
from .ranks import RankBuilder, RankModel
from .totals import Totals, totals


@dataclass(frozen=True, slots=True)
class Plan:
    """`stages`: one rank of each pipeline stage with its memory. `busiest`: an index into them. `engine`: what a GPU
    that serves holds; None on a CPU and where the run starts no engine."""

    config: Config
    hf: HFModelConfig
    cluster: Cluster
    load: Load
    totals: Totals
    stages: tuple[tuple[RankModel, Memory], ...]
    busiest: int
    engine: EngineMemory | None
    notes: tuple[str, ...]

    @property
    def memory(self) -> Memory:
        return self.stages[self.busiest][1]

    @property
    def fits(self) -> bool:
        return self.ranks_fit and self.engines_fit

    @property
    def ranks_fit(self) -> bool:
        return all(self.cluster.fits(memory) for _, memory in self.stages)

    @property
    def engines_fit(self) -> bool:
        return self.engine is None or (self.engine.sequences > 0 and self.engine.updates)


def make_plan(
    config: Config, cluster: Cluster, builder: RankBuilder, rank: int | None = None, *, source: str = "plan"
) -> Plan:
    """`rank`: the one to show; default: one of the stage that needs most.

    Raises ConfigError with every reason why the layout is impossible.
    """
    hf, problems = _problems(config, cluster, rank)
    if problems:
        raise ConfigError(source, problems)
    from dppo_megatron.hf import padded_vocab_size

    load = largest_load(config)
    padded = padded_vocab_size(hf.vocab_size, config.parallel.tensor)
    ranks = builder.build(config, rank)
    stages = tuple((r, estimate(r, hf, config, cluster.hardware, load, padded)) for r in ranks)
    if rank is not None:
        busiest = next(index for index, (r, _) in enumerate(stages) if r.rank == rank)
    else:
        busiest = max(range(len(stages)), key=lambda index: stages[index][1].tensors)
    notes = tuple(_notes(config, cluster))
    engine = engine_memory(hf, config, cluster.hardware)
    return Plan(config, hf, cluster, load, totals(hf, config, ranks), stages, busiest, engine, notes)


def _problems(config: Config, cluster: Cluster, rank: int | None) -> tuple[HFModelConfig | None, list[str]]:
    from dppo_megatron.actor.model_config import model_problems
    from dppo_megatron.actor.precision import capability_problems

    out = settings_problems(config) + cluster_rules.problems(config, cluster.nodes, cluster.gpus_per_node)
    if rank is not None and not 0 <= rank < config.parallel.world_size:
        out.append(f"--rank {rank}: parallel.world_size = {config.parallel.world_size}")
    out += capability_problems(config, cluster.hardware.capability)
    try:
        hf = read_hf_config(config.model.path)
    except ModelError as error:
        return None, out + [f"model.path = {error.source}: {problem}" for problem in error.problems]
    out += model_problems(hf, on_any_machine(config))
    if config.started_engines:
        out += serving.problems(config, hf)
    return hf, list(dict.fromkeys(out))


def _notes(config: Config, cluster: Cluster) -> Sequence[str]:
    p, per_node = config.parallel, cluster.gpus_per_node
    idle = cluster.devices - devices_needed(config)
    if idle:
        yield f"{idle} of {cluster.devices} devices have nothing to do"
    for name, size in (("tensor", p.tensor), ("expert_tensor", p.expert_tensor or 1)):
        if size > per_node or per_node % size:
            yield f"parallel.{name} = {size}: its groups cross nodes of {per_node}; every layer waits for the network"
    e = config.engine
    if config.started_engines and e.tensor_parallel > e.devices_per_node:
        yield f"engine.tensor_parallel = {e.tensor_parallel}: over {e.nodes} nodes; every layer waits for the network"
    if p.expert * (p.expert_tensor or p.tensor) > per_node and p.expert > 1:
        yield f"parallel.expert = {p.expert}: its groups cross nodes of {per_node}; dispatch goes over the network"
