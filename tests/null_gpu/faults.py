"""Faults planted into a rank: each imitates a possible change of the package and breaks one step of a case."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.null_gpu import scenario
from tests.null_gpu.scenario import Case


@dataclass(frozen=True)
class Fault:
    """shows: text of the rank's error."""

    name: str
    case: Case
    plant: Callable[[], AbstractContextManager]
    shows: str


def run(rank: int, fault: str, models: Path, directory: Path) -> None:
    """Run the fault's case with the fault on a rank."""
    planted = FAULTS[fault]
    with planted.plant():
        scenario.run(rank, planted.case, models, directory)


def _blocking_assignment() -> AbstractContextManager:
    from dppo_megatron.vocab_parallel import request
    from dppo_megatron.vocab_parallel.shard import write_header

    def written(row: torch.Tensor, shard: Any, *ids: torch.Tensor) -> None:
        write_header(row, shard, *ids)
        row[0] = shard.first

    return mock.patch.object(request, "write_header", written)


def _copy_in_the_loss() -> AbstractContextManager:
    """Asynchronous by its arguments, but from memory that is not pinned: torch reports no wait."""
    from dppo_megatron.actor import forward

    apply = forward.apply_objective

    def applied(objective: Any, rows: Any, **named: Any) -> Any:
        host = torch.zeros(rows.advantage.shape)
        return apply(objective, replace(rows, advantage=host.to(rows.advantage.device, non_blocking=True)), **named)

    return mock.patch.object(forward, "apply_objective", applied)


def _tensor_on_the_host() -> AbstractContextManager:
    from dppo_megatron.actor import forward

    apply = forward.apply_objective

    def applied(objective: Any, rows: Any, **named: Any) -> Any:
        return apply(objective, replace(rows, advantage=torch.zeros(rows.advantage.shape)), **named)

    return mock.patch.object(forward, "apply_objective", applied)


def _argument_of_attention() -> AbstractContextManager:
    """TransformerEngine wants int32."""
    from dppo_megatron.actor.batch.packing import Packer

    packed = Packer._packed

    def wider(self: Packer, *arguments: Any) -> Any:
        made = packed(self, *arguments)
        made.cu_seqlens_q = made.cu_seqlens_kv = made.cu_seqlens_q.long()
        return made

    return mock.patch.object(Packer, "_packed", wider)


def _name_of_an_argument() -> AbstractContextManager:
    """An argument that Megatron passes and that another TransformerEngine no longer takes."""
    from transformer_engine.pytorch import Linear

    forward = Linear.forward

    def renamed(self: Any, inp: Any, is_first_micro_batch: Any = None) -> Any:
        return forward(self, inp, is_first_microbatch=is_first_micro_batch)

    return mock.patch.object(Linear, "forward", renamed)


def _dtype_of_a_moment() -> AbstractContextManager:
    """Adam's state as it would be after something had kept it in bf16."""
    from dppo_megatron.actor import actor

    step = actor.optimizer_step

    def stepped(optimizer: Any, *arguments: Any, **named: Any) -> Any:
        for part in optimizer.chained_optimizers:
            for state in part.optimizer.state.values():
                state["exp_avg"] = state["exp_avg"].bfloat16()
        return step(optimizer, *arguments, **named)

    return mock.patch.object(actor, "optimizer_step", stepped)


def _no_synchronization() -> AbstractContextManager:
    """The copies to the host may not have arrived when the memory that they read is freed.

    Shown: the host's copy is read before they arrive. Not shown: that other work overwrites the freed memory, for
    here a copy reads its source at once; nor a wait missing after `refill`, whose copies here arrive at once.
    """
    return mock.patch.object(torch.cuda.Stream, "synchronize", return_value=None)


def _device_of_an_export() -> AbstractContextManager:
    """Every rank exports from device 0: only the second rank shows it."""
    from dppo_megatron.hf import export

    named = export.named_weights

    def moved(chunks: Any) -> Any:
        return ((name, weight.to("cuda:0")) for name, weight in named(chunks))

    return mock.patch.object(export, "named_weights", moved)


def _parameter_without_a_rule() -> AbstractContextManager:
    from dppo_megatron.hf.weight_map import WeightMap

    entry = WeightMap.entry

    def lacking(self: WeightMap, name: str) -> Any:
        return entry(self, name.replace("q_layernorm", "no_such_norm"))

    return mock.patch.object(WeightMap, "entry", lacking)


TENSOR = {"parallel": {"tensor": 2}}
_ALL = (
    Fault(
        "a blocking assignment",
        Case("fault", ranks=2, settings=TENSOR, steps=("waits",), objectives=("grpo",)),
        _blocking_assignment,
        "called a synchronizing CUDA operation",
    ),
    Fault(
        "a copy from memory that is not pinned",
        Case("fault", steps=("waits",), objectives=("dppo_binary_tv",)),
        _copy_in_the_loss,
        "copies between the device and memory that is not pinned",
    ),
    Fault(
        "a tensor on the host in the loss",
        Case("fault", steps=("update",), objectives=("dppo_binary_tv",)),
        _tensor_on_the_host,
        "Expected all tensors to be on the same device",
    ),
    Fault(
        "a wrong dtype to attention",
        Case("fault", te=True, steps=("logprobs",)),
        _argument_of_attention,
        "cu_seqlens.dtype",
    ),
    Fault(
        "a renamed argument",
        Case("fault", te=True, steps=("logprobs",)),
        _name_of_an_argument,
        "unexpected keyword argument",
    ),
    Fault(
        "a wrong dtype in the optimizer's step",
        Case("fault", steps=("update",)),
        _dtype_of_a_moment,
        "local_state.dtype == torch.float32",
    ),
    Fault(
        "no synchronization in the offload",
        Case("fault", steps=("offload",)),
        _no_synchronization,
        "the host's copy differs",
    ),
    Fault(
        "an export from the wrong device",
        Case("fault", ranks=2, settings={"parallel": {"pipeline": 2}}, steps=("export",)),
        _device_of_an_export,
        "exported from cuda:0",
    ),
    Fault("a parameter without a rule", Case("fault", steps=()), _parameter_without_a_rule, "no HF counterpart"),
)
FAULTS = {fault.name: fault for fault in _ALL}
