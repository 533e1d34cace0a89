"""The real Actor on the null device: one case is a layout, a model and settings, taken through every step of a run."""

import contextlib
import ctypes
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from dppo_megatron.types import TokenBatch
from tests.null_gpu import te_extension
from tests.null_gpu.host_ops import HostOperators
from tests.support.actor_cases import micro_batches, pack, sequences
from tests.support.actor_ranks import Rank
from tests.train.actor.scenarios.parts import same, weights

STEPS = ("logprobs", "update", "waits", "offload", "export", "checkpoint")


@dataclass(frozen=True, eq=False)
class Case:
    """settings: sections of the config. objectives: one update each. te: with TransformerEngine's layers.

    waits_in: in how many micro-batches each objective's loss is watched for waits.
    prompts: sequences of a micro-batch begin alike, and the beginning is computed once (True) or in each (False).
    sequential: adapters' experts are computed one after the other.
    kernels: launches Triton's kernels and those of attention, whose results then are zeros.
    """

    name: str
    model: str = "qwen3"
    ranks: int = 1
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    objectives: tuple[str, ...] = ("dppo_binary_tv", "gspo")
    waits_in: int = 4
    prompts: bool | None = None
    te: bool = False
    sequential: bool = False
    kernels: bool = False
    steps: tuple[str, ...] = STEPS


def run(rank: int, case: Case, models: Path, directory: Path) -> dict[str, Any]:
    """Run the steps of `case` on a rank, and return their numbers."""
    with device(kernels=case.kernels) as operators, _actor(case, models, directory) as actor:
        found = _steps(actor, case, directory)
        return found | {"attending": dict(operators.attending), "grouped": operators.grouped}


@contextlib.contextmanager
def device(*, kernels: bool = False) -> Iterator[HostOperators]:
    """Inside, operators on CUDA tensors have values. `kernels`: also launch those that have none, see `Case`."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # which is not there
    torch.backends.cuda.enable_mem_efficient_sdp(kernels)
    with HostOperators() as operators, contextlib.nullcontext() if kernels else _without_triton():
        yield operators


def start_group(rank: int, size: int) -> None:
    """Start gloo instead of NCCL, which `init_layout` would start; `HostOperators` gives it the device's memory."""
    timeout = timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), size, rank == 0, timeout) if size > 1 else None
    dist.init_process_group(
        "cpu:gloo,cuda:gloo", store=store or dist.HashStore(), rank=rank, world_size=size, timeout=timeout
    )


class OnDevice(Rank):
    """A rank with a null device."""

    def rendezvous(self) -> None:
        super().rendezvous()
        start_group(self.rank, self.world_size)


@contextlib.contextmanager
def _without_triton() -> Iterator[None]:
    from dppo_megatron.vocab_parallel import request, torch_backend

    with mock.patch.object(request, "choose_backend", return_value=torch_backend):
        yield


@contextlib.contextmanager
def _actor(case: Case, models: Path, directory: Path) -> Iterator[Any]:
    sections = {name: dict(values) for name, values in case.settings.items()}
    parallel = sections.pop("parallel", {})
    model = {"dtype": "bf16", "layers": "transformer_engine" if case.te else "local", **sections.pop("model", {})}
    optimizer = sections.pop("optimizer", None)
    rank = OnDevice(int(os.environ["RANK"]), case.ranks, models, directory)
    reason = mock.patch("dppo_megatron.train.actor.experts.why_sequential", return_value="the case asks for it")
    with (
        reason if case.sequential else contextlib.nullcontext(),
        rank.actor(case.model, optimizer=optimizer, settings=model, sections=sections, **parallel) as actor,
    ):
        assert actor.layout.device == torch.device("cuda", rank.rank), actor.layout.device
        yield actor


def _steps(actor: Any, case: Case, directory: Path) -> dict[str, Any]:
    from dppo_megatron.objectives import build_objective

    found: dict[str, Any] = {"layout": actor.layout.describe()}
    te_extension.calls.clear()
    batches = micro_batches(sequences(), 4) if case.prompts is None else _with_prompts(case.prompts)
    share = slice(actor.layout.data_parallel_rank, None, actor.layout.data_parallel_size)
    batches = batches[share]
    if "logprobs" in case.steps:
        found["logprobs"] = torch.cat(actor.logprobs(batches))
    objectives = [build_objective(name) for name in case.objectives]
    if "update" in case.steps:
        found["updates"] = [actor.train_update(_read_by(o, batches), o) for o in objectives]
    if "waits" in case.steps:
        for objective in objectives:
            with no_waits(objective.name):
                actor.train_update(_read_by(objective, batches[: case.waits_in]), objective)
    if "all_waits" in case.steps:
        found["all_waits"] = all_waits(lambda: actor.train_update(_read_by(objectives[0], batches), objectives[0]))
    if "offload" in case.steps:
        found["offload"] = offload(actor)
    if "export" in case.steps:
        found["export"] = export(actor)
    if "checkpoint" in case.steps:
        checkpoint(actor, directory / f"checkpoint-{case.name}")
    found["te"] = dict(te_extension.calls)
    return found


def _with_prompts(shared: bool) -> list[TokenBatch]:
    parts, batches = sequences(), []
    for group in (parts[number::4] for number in range(4)):
        prompt = min(len(part["token_ids"]) for part in group) - 1
        for part in group[1:]:
            part["token_ids"][:prompt] = group[0]["token_ids"][:prompt]
        lengths = torch.tensor([0, *[prompt] * (len(group) - 1)])
        batches.append(replace(pack(group), shared_prefix=lengths if shared else None))
    return batches


def _read_by(objective: Any, batches: list[TokenBatch]) -> list[TokenBatch]:
    """`batches` with the fields that the objective reads."""
    if not objective.needs_topk:
        batches = [replace(b, topk_ids=None, rollout_topk_logprob=None) for b in batches]
    return [replace(b, old_logprob=b.rollout_logprob) if objective.needs_old else b for b in batches]


@contextlib.contextmanager
def no_waits(name: str) -> Iterator[None]:
    """Inside, a wait of the host for the device within the loss raises, and so does a copy from memory not pinned."""
    from dppo_megatron.train.actor import forward

    compute, pageable = forward.LossStep.loss, ctypes.CDLL("libcudart.so.13").nullGpuPageableCopies
    pageable.restype = ctypes.c_long

    def loss(*arguments: Any) -> Any:
        before = pageable()
        torch.cuda.set_sync_debug_mode("error")
        try:
            result = compute(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if pageable() > before:
            raise RuntimeError(f"{name}: {pageable() - before} copies between the device and memory that is not pinned")
        return result

    with mock.patch.object(forward.LossStep, "loss", loss):
        yield


def all_waits(function: Callable[[], object]) -> tuple[int, int]:
    """How often the host waits for the device inside `function`, and how many copies are from memory not pinned."""
    pageable = ctypes.CDLL("libcudart.so.13").nullGpuPageableCopies
    pageable.restype = ctypes.c_long
    before = pageable()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(w.message) for w in told), pageable() - before


def offload(actor: Any) -> int:
    """Return the freed bytes. The host has the contents before the device's memory is freed, and the weights return."""
    from dppo_megatron.train.actor import offload as module

    empty = module._Storages.empty

    def checked(storages: Any) -> int:
        kept = {key: module._bytes(s).cpu() for key, s in storages._storages.items()}
        freed = empty(storages)
        for key, pieces in storages._host.items():
            assert torch.equal(torch.cat(pieces), kept[key]), "the host's copy differs from the memory that is freed"
        return freed

    before = weights(actor)
    with mock.patch.object(module._Storages, "empty", checked), actor.offloaded() as freed:
        pass
    assert same(before, weights(actor))
    return freed


def export(actor: Any) -> int:
    """Tensors that this rank exports, all from its own device."""
    from dppo_megatron.hf import export_weights
    from dppo_megatron.weights.fingerprint import add

    sums: dict = {}
    count = 0
    for name, tensor in export_weights(actor.model_chunks, actor.hf, torch.bfloat16):
        assert tensor.device == actor.layout.device, f"{name} is exported from {tensor.device}"
        add(sums, name, tensor)
        count += 1
    return count


def checkpoint(actor: Any, directory: Path) -> None:
    before = weights(actor)
    actor.save_checkpoint(directory, 1, {}, 1)
    actor.finish_checkpoint()
    for chunk in actor.model_chunks:
        for p in chunk.parameters():
            p.data.zero_()
    actor.load_checkpoint(directory)
    assert same(before, weights(actor))


if __name__ == "__main__":
    print(run(0, Case("alone"), *map(Path, sys.argv[1:])))
