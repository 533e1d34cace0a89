"""Builds a rank's real model on the meta device, in a fake process group of the full world size.

Megatron decides which layers and shards a rank has. The build runs in a child process, because Megatron's groups, the
environment and this machine's GPUs belong to the planning process.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dppo_megatron.config import Config
from dppo_megatron.run.checks.model import on_any_machine

if TYPE_CHECKING:
    from torch import nn

    from dppo_megatron.hf import HFModelConfig
    from dppo_megatron.hf.megatron_model import ParallelRanks
    from dppo_megatron.train.actor.layout import Layout


@dataclass(frozen=True, slots=True)
class RankModel:
    """Lists a rank's model sizes in elements. All ranks in a pipeline stage have equal sizes."""

    rank: int
    stage: int
    chunks: tuple[tuple[int, ...], ...]  # global layer indices, by model chunk
    has_embedding: bool
    has_head: bool
    dense: int  # trained parameters, optimizer state sharded over data x context parallel ranks
    expert: int  # trained parameters, optimizer state sharded over expert-data parallel ranks
    frozen: int  # all other parameters
    buffers: int  # expert biases, fp32
    largest: int  # elements in the largest parameter
    largest_trained: int
    gated: int  # trained gate and up projections, which Megatron merges when it loads them
    dense_replicas: int  # ranks that share a copy of the dense optimizer state
    expert_replicas: int
    whole: dict[str, int]  # HF tensor -> elements on all ranks of the stage, from this rank's shapes

    @property
    def trained(self) -> int:
        return self.dense + self.expert

    @property
    def parameters(self) -> int:
        return self.trained + self.frozen


class RankBuilder:
    """Builds rank models in a child process. A context manager that ends the child process on exit."""

    def __init__(self) -> None:
        self._built: dict[tuple, list[RankModel]] = {}

    def __enter__(self) -> RankBuilder:
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_without_gpus)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def build(self, config: Config, rank: int | None = None) -> list[RankModel]:
        """Build a rank of each pipeline stage in order, including `rank` if given, in half a second each."""
        key = (config.model.path, config.model.lora, config.parallel, rank)
        if key not in self._built:
            self._built[key] = self._pool.submit(build_ranks, config, rank).result()
        return self._built[key]


def _without_gpus() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def build_ranks(config: Config, rank: int | None) -> list[RankModel]:
    """Run `RankBuilder.build` in a process without torch.distributed, and shut torch.distributed down afterwards."""
    p = config.parallel
    per_stage = p.world_size // p.pipeline  # the pipeline stage varies slowest with the rank
    ranks = [stage * per_stage for stage in range(p.pipeline)]
    if rank is not None:
        ranks[rank // per_stage] = rank
    return [_build(config, r) for r in ranks]


def _build(config: Config, rank: int) -> RankModel:
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from dppo_megatron.hf import read_hf_config
    from dppo_megatron.train.actor import init_layout
    from dppo_megatron.train.actor.model import build_model
    from dppo_megatron.train.actor.model_config import transformer_config

    config = on_any_machine(config)
    os.environ["WORLD_SIZE"] = str(config.parallel.world_size)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=config.parallel.world_size)
    layout = replace(init_layout(config), device=torch.device("meta"))
    try:
        hf = read_hf_config(config.model.path)
        transformer = transformer_config(hf, config)
        transformer.perform_initialization = False
        with torch.device("meta"):
            chunks = build_model(hf, config, layout, transformer)
        return _describe(chunks, hf, layout)
    finally:
        layout.close()


def _describe(chunks: Sequence[nn.Module], hf: HFModelConfig, layout: Layout) -> RankModel:
    import torch
    from megatron.core import parallel_state

    from dppo_megatron.hf.megatron_model import ParallelRanks, has_ends, local_layers

    parameters = [p for chunk in chunks for p in chunk.parameters()]
    sharded = {True: 0, False: 0}
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in trained:
        sharded[getattr(parameter, "allreduce", True)] += parameter.numel()
    first, last = has_ends(chunks)
    return RankModel(
        rank=layout.rank,
        stage=layout.pipeline_rank,
        chunks=tuple(tuple(local_layers([chunk])) for chunk in chunks),
        has_embedding=first,
        has_head=last,
        dense=sharded[True],
        expert=sharded[False],
        frozen=sum(p.numel() for p in parameters if not p.requires_grad),
        buffers=sum(b.numel() for chunk in chunks for b in chunk.buffers() if b.dtype == torch.float32),
        largest=max(p.numel() for p in parameters),
        largest_trained=max(p.numel() for p in trained),
        gated=sum(p.numel() for c in chunks for name, p in c.named_parameters() if p.requires_grad and _gated(name)),
        dense_replicas=layout.data_group.size(),
        expert_replicas=parallel_state.get_expert_data_parallel_group().size(),
        whole=_whole(chunks, hf, layout, ParallelRanks.current()),
    )


def _gated(name: str) -> bool:
    return "linear_fc1.weight" in name or name.endswith("linear_fc1.lora.B")


def _whole(chunks: Sequence[nn.Module], hf: HFModelConfig, layout: Layout, ranks: ParallelRanks) -> dict[str, int]:
    """Return how many elements each HF tensor of this stage has, without vocabulary padding."""
    from dppo_megatron.hf import WeightMap
    from dppo_megatron.hf.megatron_model import infer_layout, named_weights

    weight_map = WeightMap(hf, infer_layout(chunks, hf, ranks))
    padding = (weight_map.layout.padded_vocab_size - hf.vocab_size) * hf.hidden_size
    whole: dict[str, int] = {}
    for name, weight in named_weights(chunks):
        entry = weight_map.entry(name)
        if entry.rule.duplicate:
            continue
        shards = ranks.expert_tensor.size if entry.is_expert else ranks.tensor.size
        numel = weight.numel() * (1 if entry.op.replicated else shards)
        if name.startswith(("embedding.", "output_layer.")):
            numel -= padding
        # Other expert-parallel ranks have equally many other experts, counted under this rank's names.
        copies = layout.expert_size if entry.is_expert else 1
        names = [tensor.name for tensor in entry.hf]
        shapes = [math.prod(tensor.shape) for tensor in entry.hf]
        for n, s in zip(names, shapes, strict=True):
            # A tensor that stacks experts gets a share from each expert.
            whole[n] = copies * numel * s // sum(shapes) + (whole.get(n, 0) if entry.stacks_experts else 0)
    return whole
