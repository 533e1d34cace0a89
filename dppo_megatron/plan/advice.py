"""What to change first when a plan does not fit: each single change tried on the plan, cheapest first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dppo_megatron.config import Config, ConfigError
from dppo_megatron.hf import HFModelConfig

from .cluster import Cluster
from .planning import Plan, make_plan
from .ranks import RankBuilder

Change = dict[str, Any]  # dotted setting -> value


@dataclass(frozen=True, slots=True)
class Advice:
    """One change to the config, what it saves on the busiest rank, whether the plan fits with it, and its price."""

    change: Change
    saves: int
    fits: bool
    price: str

    def __str__(self) -> str:
        return " ".join(f"--set {name}={_yaml(value)}" for name, value in self.change.items())


def advise(plan: Plan, builder: RankBuilder) -> list[Advice]:
    """The changes that save trainer ranks anything: first the one to make, then the others, cheapest first.

    None where the ranks fit. The one to make is the cheapest that makes the plan fit, else the one that saves most.
    """
    if plan.ranks_fit:
        return []
    before = max(memory.tensors for _, memory in plan.stages)
    found = []
    for change, price in _candidates(plan.config, plan.hf, plan.cluster):
        try:
            changed = make_plan(_with(plan.config, change), plan.cluster, builder)
        except ConfigError:
            continue
        saves = before - max(memory.tensors for _, memory in changed.stages)
        if saves > before // 200:
            found.append(Advice(change, saves, changed.ranks_fit, price))
    first = next((advice for advice in found if advice.fits), max(found, key=lambda a: a.saves, default=None))
    return [] if first is None else [first, *(advice for advice in found if advice is not first)]


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
        part = getattr(config, section).model_copy(update={name: value})
        config = config.model_copy(update={section: part})
    return config


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
