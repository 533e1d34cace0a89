"""Computes a rank's results on its logits columns, and counts the rank's collectives."""

from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.statistics_reference import Case, lay_out, make_inputs, weighted


class CountCollectives(TorchDispatchMode):
    """Counts, by name, torch.distributed operations that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.found[func.name()] += 1
        return func(*args, **(kwargs or {}))


class Largest(TorchDispatchMode):
    """Measures the largest storage that any operation allocates."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func._schema.name.startswith("aten::_unsafe_view"):
            given_storage = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
            if result.untyped_storage().data_ptr() not in given_storage:
                self.nbytes = max(self.nbytes, result.untyped_storage().nbytes())
        return result


def shard_case(
    case: Case, rank: int, backend: str = "torch", count: bool = True, device: str = "cpu", **options: Any
) -> dict[str, Any]:
    """Run token_statistics on this rank's columns. Return results and gradient, on the CPU, and collectives.

    count=False: do not count collectives, because torch.compile does nothing under the counting dispatch modes.
    """
    from dppo_megatron.vocab_parallel import token_statistics

    inputs = make_inputs(case).to(device)
    first = sum(case.columns[:rank])
    shard = lay_out(inputs.logits[:, first : first + case.columns[rank]], case.layout)
    logits = shard.requires_grad_()
    uneven = len(set(case.columns)) > 1
    if uneven:
        options["vocab_start"] = first
    forward, backward = CountCollectives(), CountCollectives()
    with forward if count else nullcontext():
        stats = token_statistics(
            logits * 1.0 if case.layout == "contiguous" else logits,
            inputs.target,
            inputs.topk,
            case.vocab,
            inputs.temperature,
            dist.group.WORLD if dist.is_initialized() else None,
            case.entropy,
            backend,
            sampling_mask_ids=inputs.sampling_mask_ids,
            sampling_mask_counts=inputs.sampling_mask_counts,
            **options,
        )
    values = (stats.logprob, stats.entropy, stats.topk_logprob, stats.other_logprob)
    loss = weighted(values, inputs.weights, case.entropy == "differentiable")
    with backward if count else nullcontext():
        loss.backward()
    names = ("logprob", "entropy", "topk_logprob", "other_logprob")
    return {
        "values": {name: None if v is None else v.detach().cpu() for name, v in zip(names, values, strict=True)},
        "nonfinite": stats.nonfinite.cpu(),
        "gradient": None if logits.grad is None else logits.grad.cpu(),
        "forward": dict(forward.found),
        "backward": dict(backward.found),
    }
