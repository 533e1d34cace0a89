"""Faults planted into a rank: each imitates a possible change of the package and breaks one step of a case."""

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.null_gpu import scenario
from tests.null_gpu.scenario import Case


@dataclass(frozen=True)
class Fault:
    """replaces: the path of a function; `plant` is called with the function before its arguments. shows: the error."""

    case: Case
    replaces: str
    plant: Callable[..., Any]
    shows: str


TENSOR = {"parallel": {"tensor": 2}}
FORWARD = "dppo_megatron.train.actor.forward.apply_objective"
HEADER = "dppo_megatron.vocab_parallel.request.write_header"
EXPORT = "dppo_megatron.hf.export.named_weights"
PAGEABLE = "copies between the device and memory that is not pinned"
FAULTS: dict[str, Fault] = {}


def shows(text: str, replaces: str, **case: Any) -> Callable[[Callable[..., Any]], None]:
    """Register a fault that fails this case, with `text` in the error of a rank."""

    def register(plant: Callable[..., Any]) -> None:
        FAULTS[plant.__name__.replace("_", " ")] = Fault(Case("fault", **case), replaces, plant, text)

    return register


def run(rank: int, fault: str, models: Path, directory: Path) -> None:
    """Run the fault's case with the fault on a rank."""
    planted = FAULTS[fault]
    owner, _, name = planted.replaces.rpartition(".")
    original = getattr(pkgutil.resolve_name(owner), name)
    with mock.patch(planted.replaces, lambda *given, **named: planted.plant(original, *given, **named)):
        scenario.run(rank, planted.case, models, directory)


@shows(
    "called a synchronizing CUDA operation", HEADER, ranks=2, settings=TENSOR, steps=("waits",), objectives=("grpo",)
)
def a_blocking_assignment(write_header: Any, row: torch.Tensor, shard: Any, *ids: torch.Tensor) -> None:
    write_header(row, shard, *ids)
    row[0] = shard.first


@shows(PAGEABLE, FORWARD, steps=("waits",), objectives=("dppo_binary_tv",))
def a_copy_from_memory_that_is_not_pinned(apply: Any, objective: Any, rows: Any, **named: Any) -> Any:
    """Asynchronous by its arguments, but from memory that is not pinned: torch reports no wait."""
    advantage = torch.zeros(rows.advantage.shape).to(rows.advantage.device, non_blocking=True)
    return apply(objective, replace(rows, advantage=advantage), **named)


@shows("on cpu, logprob has", FORWARD, steps=("update",), objectives=("dppo_binary_tv",))
def a_tensor_on_the_host_in_the_loss(apply: Any, objective: Any, rows: Any, **named: Any) -> Any:
    return apply(objective, replace(rows, advantage=torch.zeros(rows.advantage.shape)), **named)


@shows("cu_seqlens.dtype", "dppo_megatron.train.actor.batch.packing.Packer._packed", te=True, steps=("logprobs",))
def a_wrong_dtype_to_attention(packed: Any, *arguments: Any) -> Any:
    """TransformerEngine wants int32."""
    made = packed(*arguments)
    made.cu_seqlens_q = made.cu_seqlens_kv = made.cu_seqlens_q.long()
    return made


@shows("unexpected keyword argument", "transformer_engine.pytorch.Linear.forward", te=True, steps=("logprobs",))
def a_renamed_argument(forward: Any, layer: Any, inp: Any, is_first_micro_batch: Any = None) -> Any:
    """An argument that Megatron passes and that another TransformerEngine no longer takes."""
    return forward(layer, inp, is_first_microbatch=is_first_micro_batch)


@shows("local_state.dtype == torch.float32", "dppo_megatron.train.actor.actor.optimizer_step", steps=("update",))
def a_wrong_dtype_in_the_optimizers_step(step: Any, optimizer: Any, *arguments: Any, **named: Any) -> Any:
    """Adam's state as it would be after something had kept it in bf16."""
    for part in optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].bfloat16()
    return step(optimizer, *arguments, **named)


@shows("the host's copy differs", "torch.cuda.Stream.synchronize", steps=("offload",))
def no_synchronization_in_the_offload(synchronize: Any, stream: torch.cuda.Stream) -> None:
    """The copies to the host may not have arrived when the memory that they read is freed.

    Shown: the host's copy is read before they arrive. Not shown: that other work overwrites the freed memory, for
    here a copy reads its source at once; nor a wait missing after `refill`, whose copies here arrive at once.
    """


@shows("exported from cuda:0", EXPORT, ranks=2, settings={"parallel": {"pipeline": 2}}, steps=("export",))
def an_export_from_the_wrong_device(named: Any, chunks: Any) -> Any:
    """Every rank exports from device 0: only the second rank shows it."""
    return ((name, weight.to("cuda:0")) for name, weight in named(chunks))


@shows("no HF counterpart", "dppo_megatron.hf.weight_map.WeightMap.entry", steps=())
def a_parameter_without_a_rule(entry: Any, weight_map: Any, name: str) -> Any:
    return entry(weight_map, name.replace("q_layernorm", "no_such_norm"))
