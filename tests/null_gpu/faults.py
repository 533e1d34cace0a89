"""Faults planted into a rank: each imitates a possible change of the package and breaks one step of a case."""

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

    case: Case
    plant: Callable[[], AbstractContextManager]
    shows: str


TENSOR = {"parallel": {"tensor": 2}}
FAULTS: dict[str, Fault] = {}


def shows(text: str, **case: Any) -> Callable[[Callable[[], AbstractContextManager]], None]:
    """Register a fault that fails this case, with `text` in the error of a rank."""

    def register(plant: Callable[[], AbstractContextManager]) -> None:
        FAULTS[plant.__name__.replace("_", " ")] = Fault(Case("fault", **case), plant, text)

    return register


def run(rank: int, fault: str, models: Path, directory: Path) -> None:
    """Run the fault's case with the fault on a rank."""
    planted = FAULTS[fault]
    with planted.plant():
        scenario.run(rank, planted.case, models, directory)


@shows("called a synchronizing CUDA operation", ranks=2, settings=TENSOR, steps=("waits",), objectives=("grpo",))
def a_blocking_assignment() -> AbstractContextManager:
    from dppo_megatron.vocab_parallel import request
    from dppo_megatron.vocab_parallel.shard import write_header

    def written(row: torch.Tensor, shard: Any, *ids: torch.Tensor) -> None:
        write_header(row, shard, *ids)
        row[0] = shard.first

    return mock.patch.object(request, "write_header", written)


@shows("copies between the device and memory that is not pinned", steps=("waits",), objectives=("dppo_binary_tv",))
def a_copy_from_memory_that_is_not_pinned() -> AbstractContextManager:
    """Asynchronous by its arguments, but from memory that is not pinned: torch reports no wait."""
    from dppo_megatron.actor import forward

    apply = forward.apply_objective

    def applied(objective: Any, rows: Any, **named: Any) -> Any:
        host = torch.zeros(rows.advantage.shape)
        return apply(objective, replace(rows, advantage=host.to(rows.advantage.device, non_blocking=True)), **named)

    return mock.patch.object(forward, "apply_objective", applied)


@shows("Expected all tensors to be on the same device", steps=("update",), objectives=("dppo_binary_tv",))
def a_tensor_on_the_host_in_the_loss() -> AbstractContextManager:
    from dppo_megatron.actor import forward

    apply = forward.apply_objective

    def applied(objective: Any, rows: Any, **named: Any) -> Any:
        return apply(objective, replace(rows, advantage=torch.zeros(rows.advantage.shape)), **named)

    return mock.patch.object(forward, "apply_objective", applied)


@shows("cu_seqlens.dtype", te=True, steps=("logprobs",))
def a_wrong_dtype_to_attention() -> AbstractContextManager:
    """TransformerEngine wants int32."""
    from dppo_megatron.actor.batch.packing import Packer

    packed = Packer._packed

    def wider(self: Packer, *arguments: Any) -> Any:
        made = packed(self, *arguments)
        made.cu_seqlens_q = made.cu_seqlens_kv = made.cu_seqlens_q.long()
        return made

    return mock.patch.object(Packer, "_packed", wider)


@shows("unexpected keyword argument", te=True, steps=("logprobs",))
def a_renamed_argument() -> AbstractContextManager:
    """An argument that Megatron passes and that another TransformerEngine no longer takes."""
    from transformer_engine.pytorch import Linear

    forward = Linear.forward

    def renamed(self: Any, inp: Any, is_first_micro_batch: Any = None) -> Any:
        return forward(self, inp, is_first_microbatch=is_first_micro_batch)

    return mock.patch.object(Linear, "forward", renamed)


@shows("local_state.dtype == torch.float32", steps=("update",))
def a_wrong_dtype_in_the_optimizers_step() -> AbstractContextManager:
    """Adam's state as it would be after something had kept it in bf16."""
    from dppo_megatron.actor import actor

    step = actor.optimizer_step

    def stepped(optimizer: Any, *arguments: Any, **named: Any) -> Any:
        for part in optimizer.chained_optimizers:
            for state in part.optimizer.state.values():
                state["exp_avg"] = state["exp_avg"].bfloat16()
        return step(optimizer, *arguments, **named)

    return mock.patch.object(actor, "optimizer_step", stepped)


@shows("the host's copy differs", steps=("offload",))
def no_synchronization_in_the_offload() -> AbstractContextManager:
    """The copies to the host may not have arrived when the memory that they read is freed.

    Shown: the host's copy is read before they arrive. Not shown: that other work overwrites the freed memory, for
    here a copy reads its source at once; nor a wait missing after `refill`, whose copies here arrive at once.
    """
    return mock.patch.object(torch.cuda.Stream, "synchronize", return_value=None)


@shows("exported from cuda:0", ranks=2, settings={"parallel": {"pipeline": 2}}, steps=("export",))
def an_export_from_the_wrong_device() -> AbstractContextManager:
    """Every rank exports from device 0: only the second rank shows it."""
    from dppo_megatron.hf import export

    named = export.named_weights

    def moved(chunks: Any) -> Any:
        return ((name, weight.to("cuda:0")) for name, weight in named(chunks))

    return mock.patch.object(export, "named_weights", moved)


@shows("no HF counterpart", steps=())
def a_parameter_without_a_rule() -> AbstractContextManager:
    from dppo_megatron.hf.weight_map import WeightMap

    entry = WeightMap.entry

    def lacking(self: WeightMap, name: str) -> Any:
        return entry(self, name.replace("q_layernorm", "no_such_norm"))

    return mock.patch.object(WeightMap, "entry", lacking)
