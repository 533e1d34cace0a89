"""Describes this rank's part of the work in a frozen object: process groups, ranks and device."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from dppo_megatron.common.local_store import world_store
from dppo_megatron.common.ranks import Ranks
from dppo_megatron.config.schema import Config
from dppo_megatron.errors import ExpectedError

from . import without_cuda


class LayoutError(ExpectedError, ValueError):
    """Raised if the started processes do not fit the configured layout."""


@dataclass(frozen=True)
class Layout:
    """Contains sizes, this rank's positions, and the process groups that the actor uses directly."""

    rank: int
    world_size: int
    device: torch.device
    backend: str
    tensor_size: int
    tensor_rank: int
    pipeline_size: int
    pipeline_rank: int
    virtual_pipeline_size: int | None
    context_size: int
    context_rank: int
    data_parallel_size: int
    data_parallel_rank: int  # index of this rank's share of every batch
    expert_size: int
    expert_tensor_size: int
    tensor_group: dist.ProcessGroup
    pipeline_group: dist.ProcessGroup
    context_group: dist.ProcessGroup
    data_group: dist.ProcessGroup  # data x context parallel: ranks with the same dense weights
    expert_group: dist.ProcessGroup  # expert tensor x expert: ranks that exchange tokens in a layer with experts
    sequence_parallel: bool

    @property
    def is_last_stage(self) -> bool:
        """Return whether this rank computes the head and the loss."""
        return self.pipeline_rank == self.pipeline_size - 1

    def describe(self) -> str:
        """Describe the layout in a log line."""
        tensor = f"tensor {self.tensor_size}" + (" + sequence" if self.sequence_parallel else "")
        pipeline = f"pipeline {self.pipeline_size}"
        if self.virtual_pipeline_size:
            pipeline += f" x {self.virtual_pipeline_size} virtual stages"
        sizes = f"{tensor}, {pipeline}, context {self.context_size}, data {self.data_parallel_size}"
        if self.expert_size > 1:
            sizes += f", expert {self.expert_size} x tensor {self.expert_tensor_size}"
        return f"{self.world_size} ranks over {self.backend} on {self.device.type}: {sizes} (parallel)"

    def close(self) -> None:
        """Destroy Megatron's groups and torch.distributed. Safe to call twice."""
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()


def local_gpu(count: int, environment: Mapping[str, str]) -> int:
    """Return the index of this rank's GPU among `count` visible GPUs: LOCAL_RANK if the node's ranks see all GPUs.

    The index is 0 if the rank sees only the GPU that Slurm bound to it (`--gpus-per-task=1`). Raises LayoutError for
    any other number.
    """
    rank = int(environment.get("LOCAL_RANK", "0"))
    ranks = int(environment.get("LOCAL_WORLD_SIZE", rank + 1))
    if count == 1 or count >= ranks:
        return rank % count
    raise LayoutError(
        f"LOCAL_RANK = {rank}: of {ranks} ranks on node {socket.gethostname()}, this one sees {count} GPUs; show "
        "every rank all GPUs of its node or one of its own (slurm.gpus_per_node, slurm.srun_args), or start fewer ranks"
    )


def check_own_gpus(ranks: Ranks, node: str, uuid: str) -> None:
    """Raise LayoutError on every rank if two ranks of a node have the same GPU. All ranks must call it."""
    owners: dict[tuple[str, str], list[int]] = {}
    for rank, place in enumerate(ranks.gather((node, uuid), "every rank's node and GPU")):
        owners.setdefault(place, []).append(rank)
    if conflicts := {place: gpu_ranks for place, gpu_ranks in owners.items() if len(gpu_ranks) > 1}:
        lines = [
            f"ranks {', '.join(map(str, gpu_ranks))} have GPU {gpu} of node {at}"
            for (at, gpu), gpu_ranks in conflicts.items()
        ]
        raise LayoutError(
            f"{'; '.join(lines)}: each rank needs its own; start as many ranks on a node as it has GPUs, with "
            "LOCAL_RANK 0, 1, ..., and bind none or a different one to each (CUDA_VISIBLE_DEVICES, slurm.srun_args)"
        )


def init_layout(config: Config) -> Layout:
    """Start torch.distributed (NCCL on CUDA, else gloo) and Megatron's groups; seed every generator with `run.seed`.

    Rank, world size and rendezvous come from the environment, as torchrun and the launcher set them; a single process
    needs no variables. A collective that takes longer than `parallel.timeout_s` raises. If torch.distributed is already
    started, the existing process group is used. Raises LayoutError if the environment does not match the config.
    """
    parallel = config.parallel
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != parallel.world_size:
        raise LayoutError(
            f"parallel.world_size = {parallel.world_size}: {world_size} trainer processes were started; "
            f"start {parallel.world_size}, or set it to {world_size}"
        )
    without_cuda.install()
    cuda = torch.cuda.is_available()
    backend = "nccl" if cuda else "gloo"
    device = torch.device("cpu")
    if cuda:
        device = torch.device("cuda", local_gpu(torch.cuda.device_count(), os.environ))
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=parallel.timeout_s)
    if dist.is_initialized():
        backend = dist.get_backend()
    elif "RANK" in os.environ:
        if missing := [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
            raise LayoutError(f"RANK is set, {', '.join(missing)} not; start ranks by torchrun or srun, or unset RANK")
        store = world_store(timeout)
        place: dict[str, Any] = {"rank": int(os.environ["RANK"]), "world_size": world_size} if store is not None else {}
        dist.init_process_group(backend, store=store, timeout=timeout, **place)
        if cuda:  # NCCL, which connects the ranks later, would hang or fail with a less clear error
            check_own_gpus(Ranks(), socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid))
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        distributed_timeout_minutes=parallel.timeout_s / 60,
        create_gloo_process_groups=False,
    )
    seed_everything(config.run.seed)
    return Layout(
        rank=dist.get_rank(),
        world_size=world_size,
        device=device,
        backend=backend,
        tensor_size=parallel.tensor,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        pipeline_size=parallel.pipeline,
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        virtual_pipeline_size=parallel.virtual_pipeline,
        context_size=parallel.context,
        context_rank=parallel_state.get_context_parallel_rank(),
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        expert_size=parallel.expert,
        expert_tensor_size=parallel.expert_tensor or parallel.tensor,
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        pipeline_group=parallel_state.get_pipeline_model_parallel_group(),
        context_group=parallel_state.get_context_parallel_group(),
        data_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        expert_group=parallel_state.get_expert_tensor_and_model_parallel_group(),
        sequence_parallel=parallel.sequence,
    )


def seed_everything(seed: int) -> None:
    """Seed Python, numpy, torch, and Megatron's tracker, which gives tensor-parallel ranks different streams.

    Pipeline stages get different seeds; data-parallel replicas share a seed.
    """
    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
