"""Plans a config on a cluster, or reports why it is impossible, and suggests changes to a plan that does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dppo_megatron.common.hardware import Hardware
from dppo_megatron.config import Config, ConfigError, with_settings
from dppo_megatron.hf import HFModelConfig, ModelError, padded_vocab_size, read_hf_config
from dppo_megatron.rollout.engines.teachers import teacher_config
from dppo_megatron.run.checks import engine, settings_problems
from dppo_megatron.run.checks.devices import cluster_problems, devices_needed
from dppo_megatron.run.checks.model import on_any_machine

from .engines import EngineMemory, engine_memory
from .memory import Load, Memory, estimate, largest_load
from .ranks import RankBuilder, RankModel
from .totals import Totals, totals

Change = dict[str, Any]  # dotted setting -> value


@dataclass(frozen=True, slots=True)
class Cluster:
    """Describes the machines that a plan targets."""

    nodes: int
    gpus_per_node: int
    hardware: Hardware

    @property
    def devices(self) -> int:
        return self.nodes * self.gpus_per_node

    def need(self, memory: Memory) -> int:
        """Return how many device bytes `memory` needs, including libraries and margin."""
        return memory.tensors + self.hardware.reserved_bytes + self.hardware.margin_bytes

    def fits(self, memory: Memory) -> bool:
        return self.need(memory) <= self.hardware.memory_bytes


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """Contains a run's plan.

    `stages` has (rank model, memory) of a rank in each pipeline stage. `busiest` is the index of the rank to show: the
    requested rank, by default the rank that needs most memory. `engine` is the memory of a serving GPU, or None on a
    CPU or if the run starts no engine.
    """

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
) -> LayoutPlan:
    """Plan a run. `rank` is the rank to show, by default a rank in the stage that needs most memory.

    Raises ConfigError with every reason why the layout is impossible.
    """
    hf = _checked(config, cluster, rank, source)
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
    return LayoutPlan(config, hf, cluster, load, totals(hf, config, ranks), stages, busiest, engine, notes)


def _checked(config: Config, cluster: Cluster, rank: int | None, source: str) -> HFModelConfig:
    """Return the model's config.json. Raises ConfigError with every reason why the layout is impossible."""
    from dppo_megatron.train.actor.model_config import model_problems
    from dppo_megatron.train.actor.precision import capability_problems

    out = settings_problems(config) + cluster_problems(config, cluster.nodes, cluster.gpus_per_node)
    if rank is not None and not 0 <= rank < config.parallel.world_size:
        out.append(f"--rank {rank}: parallel.world_size = {config.parallel.world_size}")
    out += capability_problems(config, cluster.hardware.capability)
    try:
        hf = read_hf_config(config.model.path)
    except ModelError as error:
        problems = [f"model.path = {error.source}: {problem}" for problem in error.problems]
        raise ConfigError(source, out + problems) from None
    out += model_problems(hf, on_any_machine(config))
    if config.started_engines:
        out += engine.model_problems(config, hf)
    if out:
        raise ConfigError(source, list(dict.fromkeys(out)))
    return hf


def _notes(config: Config, cluster: Cluster) -> Iterator[str]:
    p, per_node = config.parallel, cluster.gpus_per_node
    idle = cluster.devices - devices_needed(config)
    if idle:
        yield f"{idle} of {cluster.devices} devices are not used"
    for name, size in (("tensor", p.tensor), ("expert_tensor", p.expert_tensor or 1)):
        if size > per_node or per_node % size:
            yield f"parallel.{name} = {size}: its groups cross nodes of {per_node}; every layer waits for the network"
    for name, path in config.started_teachers.items():
        if memory := engine_memory(read_hf_config(path), teacher_config(config, name), cluster.hardware):
            full = "" if memory.sequences else ", which leave no room for a sequence; raise its tensor_parallel"
            yield f"distillation.teachers.{name}: {memory.weights / 2**30:.1f} GiB of weights on each device{full}"
    e = config.engine
    if config.started_engines and e.tensor_parallel > e.devices_per_node:
        yield f"engine.tensor_parallel = {e.tensor_parallel}: over {e.nodes} nodes; every layer waits for the network"
    if p.expert * (p.expert_tensor or p.tensor) > per_node and p.expert > 1:
        yield f"parallel.expert = {p.expert}: its groups cross nodes of {per_node}; dispatch goes over the network"


@dataclass(frozen=True, slots=True)
class Advice:
    """Describes a config change: bytes saved on the busiest rank, whether all ranks then fit, and the cost."""

    change: Change
    saves: int
    fits: bool
    price: str

    def __str__(self) -> str:
        return " ".join(f"--set {name}={_yaml(value)}" for name, value in self.change.items())


def advise(plan: LayoutPlan, builder: RankBuilder) -> list[Advice]:
    """Return changes that save memory on trainer ranks: the recommended change first, then the others by rising cost.

    Each change is tried on the plan. The recommended change is the cheapest that makes all ranks fit. If no change
    does, the change that saves most is recommended. The list is empty if the ranks fit.
    """
    if plan.ranks_fit:
        return []
    peak_bytes = max(memory.tensors for _, memory in plan.stages)
    options = []
    for change, price in _candidates(plan.config, plan.hf, plan.cluster):
        try:
            changed = make_plan(_with(plan.config, change), plan.cluster, builder)
        except ConfigError:
            continue
        saves = peak_bytes - max(memory.tensors for _, memory in changed.stages)
        if saves > peak_bytes // 200:
            options.append(Advice(change, saves, changed.ranks_fit, price))
    first = next((advice for advice in options if advice.fits), max(options, key=lambda a: a.saves, default=None))
    return [] if first is None else [first, *(advice for advice in options if advice is not first)]


def _candidates(config: Config, hf: HFModelConfig, cluster: Cluster) -> Iterator[tuple[Change, str]]:
    p, m, t = config.parallel, config.model, config.train
    if not p.distributed_optimizer:
        yield {"parallel.distributed_optimizer": True}, "nothing"
    if p.tensor > 1 and not p.sequence:
        yield {"parallel.sequence": True}, "nothing"
    if m.logits == "stored" and not m.fp32_head:
        yield {"model.logits": "fused"}, "one more pass over the head, about a third more of its time"
    if m.recompute == "none":
        yield {"model.recompute": "selective"}, "core attention twice"
    if t.micro_batch_tokens > 1024:
        yield {"train.micro_batch_tokens": t.micro_batch_tokens // 2}, "smaller matrix products, more micro-batches"
    if m.recompute != "full":
        yield {"model.recompute": "full"}, "every layer's forward pass twice, about a third more time"
    if hf.moe is not None and p.expert < hf.moe.num_experts:
        yield {"parallel.expert": p.expert * 2}, "tokens travel to more ranks"
    if p.tensor < cluster.gpus_per_node:
        doubled = {"parallel.tensor": p.tensor * 2, "parallel.sequence": True}
        if hf.moe is not None and p.expert_tensor is None:
            doubled["parallel.expert_tensor"] = p.tensor
        yield doubled, "two collectives a layer more or larger; half the data-parallel size"
    yield {"parallel.pipeline": p.pipeline * 2}, "a larger pipeline bubble; half the data-parallel size"
    yield {"parallel.context": p.context * 2}, "keys and values travel; half the data-parallel size"
    if not config.optimizer.offload and cluster.hardware.cuda:
        yield {"optimizer.offload": True}, "every update moves the optimizer's state to the GPU and back"


def _with(config: Config, change: Change) -> Config:
    for dotted, value in change.items():
        section, name = dotted.split(".")
        config = with_settings(config, **{section: {name: value}})
    return config


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
