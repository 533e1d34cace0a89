"""Implementations for benchmarks/token_statistics.py: ours, a full gather, and other projects' installed code."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dppo_megatron.vocab_parallel import token_statistics


@dataclass(frozen=True)
class Case:
    """One rank's inputs. make_logits returns new non-leaf logits [T, V_local], which may be overwritten."""

    target: Tensor
    topk: Tensor
    weight: Tensor
    vocab: int
    first: int
    logits: Tensor
    group: Any

    def make_logits(self) -> Tensor:
        return _Head.apply(torch.ones((), requires_grad=True), self.logits)


class _Head(torch.autograd.Function):
    """A stand-in for the output layer, without its backward pass, which is not measured."""

    @staticmethod
    def forward(ctx: Any, switch: Tensor, logits: Tensor) -> Tensor:
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


# --- implementations: (logits, case) -> tensors [T]; the benchmark differentiates their weighted sum ---


def ours(logits: Tensor, case: Case, **options: Any) -> list[Tensor]:
    topk = case.topk if options.pop("with_topk", True) else None
    result = token_statistics(logits, case.target, topk, case.vocab, group=case.group, **options)
    if options.get("entropy") == "differentiable":
        return [result.logprob, result.entropy, result.topk_logprob.sum(1), result.other_logprob]
    return [result.logprob]


def megatron(logits: Tensor, case: Case, name: str) -> list[Tensor]:
    if name == "fused":
        from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

        loss = fused_vocab_parallel_cross_entropy(logits.unsqueeze(1), case.target.unsqueeze(1), case.group)
    else:
        from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

        loss = vocab_parallel_cross_entropy(logits.unsqueeze(1), case.target.unsqueeze(1))
    return [-loss.squeeze(1)]


def gather(logits: Tensor, case: Case) -> list[Tensor]:
    """Compute all statistics from the full vocabulary on every rank."""
    logprob = torch.log_softmax(_Gather.apply(logits, case).float(), dim=-1)
    logp = logprob.gather(1, case.target.unsqueeze(1)).squeeze(1)
    with torch.no_grad():
        entropy = -(logprob.exp() * logprob).sum(1)
        ids = torch.cat((case.target.unsqueeze(1), case.topk), dim=1)
        topk = logprob.gather(1, case.topk)
        other = logprob.scatter(1, ids, float("-inf")).logsumexp(1)
    del entropy, topk, other
    return [logp]


class _Gather(torch.autograd.Function):
    """Concatenate the columns of all ranks; backward keeps the columns of this rank."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, case: Case) -> Tensor:
        ctx.first, ctx.columns = case.first, logits.shape[1]
        parts = [torch.empty_like(logits) for _ in range(dist.get_world_size(case.group))]
        dist.all_gather(parts, logits, group=case.group)
        return torch.cat(parts, dim=1)[:, : case.vocab]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        own = gradient[:, ctx.first : ctx.first + ctx.columns]
        return torch.nn.functional.pad(own, (0, ctx.columns - own.shape[1])), None


def _file_of(package: str, path: str) -> Any:
    """Load one file of an installed package, without the package's own imports if those fail."""
    name = f"{package}.{path.removesuffix('.py').replace('/', '.')}"
    try:
        return importlib.import_module(name)
    except ImportError:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise
        file = Path(spec.submodule_search_locations[0]) / path
        loaded = importlib.util.spec_from_file_location(name.replace(".", "_"), file)
        module = importlib.util.module_from_spec(loaded)
        loaded.loader.exec_module(module)
        return module


def verl(logits: Tensor, case: Case) -> list[Tensor]:
    module = _file_of("verl", "utils/megatron/tensor_parallel.py")
    entropy = module.vocab_parallel_entropy(logits)
    logp = module.vocab_parallel_log_probs_from_logits(logits, case.target)
    return [logp, 0.0 * entropy]


def slime(logits: Tensor, case: Case) -> list[Tensor]:
    module = _file_of("slime", "utils/ppo_utils.py")
    logp, entropy = module.calculate_log_probs_and_entropy(logits, case.target, case.group, with_entropy=True)
    return [logp.reshape(-1), 0.0 * entropy.reshape(-1)]


def nemo_rl(logits: Tensor, case: Case) -> list[Tensor]:
    module = _file_of("nemo_rl", "distributed/model_utils.py")
    last = case.first + logits.shape[1]
    batch = logits.unsqueeze(0)
    ids = torch.cat((case.target.unsqueeze(1), case.topk), dim=1).unsqueeze(0)
    gathered = module.ChunkedDistributedGatherLogprob.apply(batch, ids, case.first, last, 64, case.group, False)
    entropy = module.ChunkedDistributedEntropy.apply(batch, 64, case.group, False)
    return [gathered[0, :, 0], 0.0 * entropy.reshape(-1)]


IMPLEMENTATIONS: dict[str, tuple[Callable[[Tensor, Case], list[Tensor]], str]] = {
    "ours": (ours, "logp, entropy, top-K, other"),
    "ours, all differentiable": (partial(ours, entropy="differentiable"), "the same, gradients of all"),
    "ours, logp + entropy": (partial(ours, with_topk=False), "logp, entropy"),
    "ours, logp": (partial(ours, with_topk=False, entropy="none"), "logp"),
    "ours, triton": (partial(ours, backend="triton"), "logp, entropy, top-K, other"),
    "megatron": (partial(megatron, name="unfused"), "logp"),
    "megatron fused": (partial(megatron, name="fused"), "logp"),
    "slime": (slime, "logp, entropy"),
    "verl": (verl, "logp, entropy"),
    "nemo-rl chunked": (nemo_rl, "logp, entropy, top-K"),
    "full gather": (gather, "logp, entropy, top-K, other"),
}
