"""Implements torch's two FlashAttention operators on the CPU in plain torch, from import on.

Like the CUDA kernels, they take sequences of variable lengths, [rows, heads, d]. They compute in fp32 or wider. The
backward pass uses the kernel's formula with the given output and log-sum-exp (arXiv 2307.08691, algorithm 2).
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

OPERATORS = ("_flash_attention_forward", "_flash_attention_backward")


def _segments(bounds_q: Tensor, bounds_k: Tensor, longest: tuple[int, int], sizes: tuple[int, int]) -> list[Any]:
    assert bounds_q.dtype == bounds_k.dtype == torch.int32, (bounds_q.dtype, bounds_k.dtype)
    both = [list(pairwise(bounds.tolist())) for bounds in (bounds_q, bounds_k)]
    for spans, most, size in zip(both, longest, sizes, strict=True):
        lengths = [last - first for first, last in spans]
        assert min(lengths) > 0, "an empty segment"
        assert (max(lengths), spans[-1][1]) == (most, size), (lengths, most, size)
    return [(slice(*q), slice(*k)) for q, k in zip(*both, strict=True)]


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, float]:
    """Return (scores [h, queries, keys], scale). Causal segments have as many queries as keys."""
    assert q.shape[-1] == k.shape[-1]
    assert q.shape[-1] % 8 == 0
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("qhd,khd->hqk", q, k) * factor
    if causal:
        assert len(q) == len(k)
        scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), float("-inf"))
    return scores, factor


def _wide(x: Tensor, heads: int | None = None) -> Tensor:
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x if heads is None else x.repeat_interleave(heads // x.shape[1], dim=1)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, bounds_q: Tensor, bounds_k: Tensor, max_q: int, max_k: int,
    dropout: float, causal: bool, debug: bool, *, scale: float | None = None, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert (dropout, value.shape) == (0.0, key.shape)
    heads, parts, sums = query.shape[1], [], []
    for q, k in _segments(bounds_q, bounds_k, (max_q, max_k), (len(query), len(key))):
        scores, _factor = _scores(_wide(query[q]), _wide(key[k], heads), causal, scale)
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), _wide(value[k], heads)))
        sums.append(scores.logsumexp(-1))
    none = query.new_zeros(2, dtype=torch.uint64), query.new_empty(()), query.new_empty(0)
    return torch.cat(parts).to(query.dtype), torch.cat(sums, dim=1), *none


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, bounds_q: Tensor,
    bounds_k: Tensor, max_q: int, max_k: int, dropout: float, causal: bool, *_: Any, scale: float | None = None,
    **__: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    heads = query.shape[1]
    gradients = [torch.zeros_like(_wide(x)) for x in (query, key, value)]
    for q, k in _segments(bounds_q, bounds_k, (max_q, max_k), (len(query), len(key))):
        rows, keys, values = _wide(query[q]), _wide(key[k], heads), _wide(value[k], heads)
        scores, factor = _scores(rows, keys, causal, scale)
        weights, given = (scores - sums[:, q, None]).exp(), _wide(grad[q])
        of_weights = torch.einsum("qhd,khd->hqk", given, values)
        of_scores = weights * (of_weights - (given * _wide(out[q])).sum(-1).T[..., None]) * factor
        gradients[0][q] = torch.einsum("hqk,khd->qhd", of_scores, keys)
        for into, of_heads in (
            (gradients[1], torch.einsum("hqk,qhd->khd", of_scores, rows)),
            (gradients[2], torch.einsum("hqk,qhd->khd", weights, given)),
        ):
            into[k] = of_heads.unflatten(1, (key.shape[1], -1)).sum(2)
    return tuple(g.to(query.dtype) for g in gradients)


_library = torch.library.Library("aten", "IMPL")
for _name, _function in zip(OPERATORS, (_forward, _backward), strict=True):
    _library.impl(_name, _function, "CPU")
