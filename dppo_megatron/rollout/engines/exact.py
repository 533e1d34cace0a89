"""Make a CPU server's operators use the trainer's arithmetic (`common.row_math`), for `engine.exact`.

vLLM and SGLang use the same module names. The hooks are in `vllm/extension/exact_server.py` and
`sglang/plugin/exact_server.py`. If trainer ranks have shards, the server computes products and log-probs per shard and
combines them in rank order. Depends only on torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dppo_megatron.common.row_math import attention, product, rms_norm, rope_tables, rotated
from dppo_megatron.vocab_parallel import torch_backend
from dppo_megatron.vocab_parallel.topk import join_ids

VARIABLE = "DPPO_EXACT"  # server environment variable


class NoExactOperator(RuntimeError):
    """The model has a layer without an exact operator; raised while the server loads the model."""


@dataclass(frozen=True)
class Exact:
    """Contains the trainer settings that a server needs."""

    tensor: int  # number of tensor-parallel trainer ranks
    frequencies: tuple[float, ...]  # rotary embedding frequencies
    vocab_size: int
    shard_columns: int  # output head columns on each rank
    fp32_head: bool

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}


def from_environment(environment: Mapping[str, str] = os.environ) -> Operators | None:
    """Read the operators from the server's environment; return None without `engine.exact`."""
    text = environment.get(VARIABLE)
    return None if text is None else Operators(Exact(**json.loads(text)))


class Operators:
    """Computes the model operators of one server with the trainer's arithmetic."""

    def __init__(self, exact: Exact):
        self._exact = exact
        self._tables: dict[torch.dtype, tuple[Tensor, Tensor]] = {}  # dtype -> cos, sin of all positions so far

    def install(self, model: nn.Module) -> None:
        """Replace norms, rotary embeddings and activations of `model`; the server's hooks replace the other layers.

        Raises `NoExactOperator` for the first layer without a counterpart in the trainer.
        """
        for name, module in model.named_children():
            self._install(name, module)

    def _install(self, name: str, module: nn.Module) -> None:
        kind = type(module).__name__
        if kind == "RMSNorm":
            module.forward = partial(_norm, module)
        elif kind in _ROTARY:
            module.forward = self._rotary
        elif kind == "SiluAndMul":
            module.forward = self.activation
        elif kind not in _ELSEWHERE:
            if "layers." in name and not any(module.children()):
                raise NoExactOperator(f"engine.exact = true: not implemented for {name} ({kind}); set it to false")
            for child, inside in module.named_children():
                self._install(f"{name}.{child}", inside)

    def linear(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply x [T, K] by the layer weight shard by shard, add in rank order, and return [T, N]."""
        kind, ranks = type(layer).__name__, self._exact.tensor
        if kind not in _PRODUCTS:
            raise NoExactOperator(f"engine.exact = true: not implemented for {kind}; set it to false")
        if kind in _HEADS:
            return self.head(x, layer.weight)
        if kind == "RowParallelLinear":
            parts = zip(x.chunk(ranks, dim=-1), layer.weight.chunk(ranks, dim=1), strict=True)
            out, *partial_outs = [product(part, weight.t()) for part, weight in parts]
            for partial_out in partial_outs:
                out = out + partial_out
        else:
            out = self._columns(x, layer.weight, _fused(layer))
        return out if bias is None else out + bias

    def _columns(self, x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
        """Multiply by a weight that fuses several projections. Every rank has an equal share of each projection."""
        ranks = self._exact.tensor
        if ranks == 1:
            return product(x, weight.t())
        shares = [part.chunk(ranks) for part in weight.split(sizes)]
        local = [size // ranks for size in sizes]
        outs = [product(x, torch.cat(share).t()).split(local, dim=-1) for share in zip(*shares, strict=True)]
        return torch.cat([part for parts in zip(*outs, strict=True) for part in parts], dim=-1)

    def head(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return logits [T, rows of weight]; the columns after the vocabulary are 0."""
        exact, rows = self._exact, weight[: self._exact.vocab_size]
        hidden = hidden.float() if exact.fp32_head else hidden
        logits = torch.cat([product(hidden, self._shard(rows, rank).t()) for rank in range(exact.tensor)], dim=-1)
        return F.pad(logits[:, : exact.vocab_size], (0, len(weight) - len(rows)))

    def _shard(self, rows: Tensor, rank: int) -> Tensor:
        """Return the rows of `rank`, padded to the shard size."""
        columns = self._exact.shard_columns
        shard = rows[rank * columns : (rank + 1) * columns]
        return F.pad(shard, (0, 0, 0, columns - len(shard)))

    def activation(self, x: Tensor) -> Tensor:
        """Return silu(gate) * up, computed separately for the columns of each rank.

        torch rounds silu differently at the row end if the row width is not a multiple of the vector width.
        """
        gates, ups = (part.chunk(self._exact.tensor, dim=-1) for part in x.chunk(2, dim=-1))
        return torch.cat([F.silu(gate) * up for gate, up in zip(gates, ups, strict=True)], dim=-1)

    def _rotary(self, positions: Tensor, query: Tensor, key: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        cos, sin = self._rope(positions, query.dtype)
        width = cos.shape[-1]
        query_out, key_out = (rotated(x.reshape(len(positions), -1, width), cos, sin) for x in (query, key))
        return query_out.view(query.shape), key_out.view(key.shape)

    def _rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        last = int(positions.max()) if len(positions) else 0
        if dtype not in self._tables or len(self._tables[dtype][0]) <= last:
            frequencies = torch.tensor(self._exact.frequencies)
            self._tables[dtype] = rope_tables(frequencies, torch.arange(2 * last + 1), dtype)
        cos, sin = self._tables[dtype]
        return cos[positions], sin[positions]

    def logprobs(self, logits: Tensor, ids: Tensor, temperature: Tensor | None = None) -> Tensor:
        """Return fp32 log-probs [T, 1 + K] of `ids`, merged as in the trainer.

        logits: [T, V], before temperature.
        ids: [T, 1 + K], the target and the top K.
        temperature: [T], by default 1.
        """
        exact = self._exact
        ids = join_ids(ids[:, 0], ids[:, 1:])
        logits = logits.float()
        scale = 1.0 if temperature is None else temperature.float().reciprocal()
        rows = logits.new_zeros(exact.tensor, *ids.shape[:1], ids.shape[1] + 3)
        for rank, out in enumerate(rows):
            first = rank * exact.shard_columns
            block = logits[:, first : min(first + exact.shard_columns, exact.vocab_size)].clone()
            # large=False: compiled code may round differently in the trainer's process.
            torch_backend.forward(block, ids, first, scale, out, entropy=False, restore=False, large=False)
        return torch_backend.merge(rows, ids, scale, entropy=False).logprob


def attend(
    query: Tensor,
    cached: Callable[[Tensor, int], tuple[Tensor, Tensor]],
    lengths: Tensor,
    counts: Tensor,
    scale: float,
) -> Tensor:
    """Return the attention output [T, h, d] of requests over their cache.

    query: [T, h, d], the new tokens of all requests end to end.
    cached: `cached(requests [m], L)` returns keys and values [m, L, g, d] of the first L positions. Values after a
        request's length may be arbitrary.
    lengths: [n], number of tokens in each request, including new tokens.
    counts: [n], number of new tokens in each request.

    Example: counts [1, 2] and lengths [9, 2] are a decode step after 8 cached tokens and a prompt of 2 tokens; T = 3.
    """
    out = torch.empty_like(query)
    starts = counts.cumsum(0) - counts
    for count in counts.unique().tolist():
        if not count:
            continue
        members = (counts == count).nonzero().flatten()
        member_lengths = lengths[members]
        longest = int(member_lengths.max())
        rows = (starts[members][:, None] + torch.arange(count)).flatten()
        keys, values = cached(members, longest)
        # Cached values past a request's length may be NaN, and 0 * NaN is NaN.
        padding = torch.arange(longest) >= member_lengths[:, None]
        values = values.masked_fill(padding[:, :, None, None], 0.0)
        queries = query[rows].view(len(members), count, *query.shape[1:])
        out[rows] = attention(queries, keys, values, member_lengths - count, scale).flatten(0, 1)
    return out


_ROTARY = {"RotaryEmbedding", "Llama3RotaryEmbedding"}
_HEADS = {"ParallelLMHead", "VocabParallelEmbedding"}
_PRODUCTS = {"QKVParallelLinear", "MergedColumnParallelLinear", "RowParallelLinear", *_HEADS}
_ELSEWHERE = {"Attention", "RadixAttention", *_PRODUCTS}  # layers that the server's hooks replace


def _fused(layer: Any) -> list[int]:
    """Return how many rows each projection has in a fused weight: 8 heads and 2 groups of 64 give [512, 128, 128]."""
    if type(layer).__name__ == "QKVParallelLinear":
        groups = layer.num_kv_heads * layer.head_size
        return [layer.num_heads * layer.head_size, groups, groups]
    return list(layer.output_sizes)


def _norm(module: Any, x: Tensor, residual: Tensor | None = None, *_: Any) -> Any:
    if residual is None:
        return rms_norm(x, module.weight, module.variance_epsilon)[0]
    stream = residual + x
    return rms_norm(stream, module.weight, module.variance_epsilon)[0], stream
