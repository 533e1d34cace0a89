"""Record the values inside a forward pass of a served model with hooks, under the trainer's names.

vLLM and SGLang use the same module names. Depends only on torch, because SGLang servers also import this module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

Trace = dict[tuple[int, str], Tensor]
"""Maps (layer, operator) to values [rows, width] in the dtype of the computation. Layer -1 is outside the layers."""

OUTSIDE = -1
SHARDED = frozenset(
    {"q_projection", "k_projection", "v_projection", "q_norm", "k_norm", "q_rotated", "k_rotated", "attention"}
    | {"mlp_gate", "mlp_up", "mlp_activation"}
)
"""Operators with columns split over the tensor-parallel ranks, in rank order. The trainer's logits are split too."""

UNSEEN = "no hook ran; the server must be eager and read the prompt in one step (engine.extra_args; docs/certify.md)"

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")


class TraceRecorder:
    """Records the forward pass in which `model` reads `token_ids`, also in a batch with others, until `take`."""

    def __init__(self, model: nn.Module, token_ids: list[int]):
        self._token_ids = token_ids
        self._rows: slice | None = None  # rows of `token_ids` in the running pass
        self._size = 0  # number of rows in the running pass
        self._layer = OUTSIDE  # the layer that runs now
        self._trace: Trace = {}
        self._hooks = [
            module.register_forward_hook(self._hook(layer, values)) for module, layer, values in _points(model)
        ]

    def take(self) -> Trace:
        """Remove the hooks and return the recorded values on the CPU.

        The trace is empty if no pass read the tokens or no hook was called.
        """
        for hook in self._hooks:
            hook.remove()
        return self._trace

    def _hook(self, layer: int, values: Callable[..., dict[str, Tensor]]) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            if values is _EMBEDDING:
                ids = arguments[0].flatten()
                self._rows, self._size = self._locate(ids), len(ids)
            if self._rows is None:
                return
            # All layers share a rotary module that is named after the first layer.
            self._layer = self._layer if values is _rotated else layer
            for operator, value in values(module, arguments, output).items():
                rows = self._rows
                if operator == "logits":  # logits of every row but the last, for prompt log-probs
                    if len(value) != len(self._token_ids) - 1:
                        continue
                    rows = slice(None)
                else:  # some models normalize [T, h, d], others [T h, d]
                    value = value.reshape(self._size, -1)
                # Kernels write their output over their input, so the value is copied.
                self._trace[self._layer, operator] = value.detach()[rows].to("cpu", copy=True)

        return hook

    def _locate(self, ids: Tensor) -> slice | None:
        size = len(self._token_ids)
        if len(ids) < size:
            return None
        token_ids = torch.tensor(self._token_ids, dtype=ids.dtype, device=ids.device)
        places = (ids.unfold(0, size, 1) == token_ids).all(1).nonzero()
        return slice(int(places[0]), int(places[0]) + size) if len(places) else None


def joined(parts: list[Trace], sharded: frozenset[str] = SHARDED) -> Trace:
    """Join the traces of all tensor-parallel ranks, given in rank order."""
    first = parts[0]
    return {
        key: torch.cat([part[key] for part in parts], dim=-1) if key[1] in sharded and len(parts) > 1 else value
        for key, value in first.items()
    }


def _points(model: nn.Module) -> Iterator[tuple[nn.Module, int, Callable[..., dict[str, Tensor]]]]:
    for name, module in model.named_modules():
        match = _LAYER.search(name)
        layer, place = (int(match[1]), match[2]) if match else (OUTSIDE, name.rpartition(".")[2])
        values = (_OF_LAYERS if match else _OF_MODEL).get(place)
        if values is not None:
            yield module, layer, values


def _whole(operator: str) -> Callable[..., dict[str, Tensor]]:
    def values(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> dict[str, Tensor]:
        output = output[0] if isinstance(output, tuple) else output
        return {operator: output} if isinstance(output, Tensor) else {}

    return values


def _norm(operator: str, residual: str) -> Callable[..., dict[str, Tensor]]:
    """Return a function that returns a norm's output and the residual stream that the norm reads.

    Some norms add the residual to their input first. Then the stream is the sum.
    """

    def values(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> dict[str, Tensor]:
        normed, stream = output if isinstance(output, tuple) else (output, arguments[0])
        return {residual: stream, operator: normed}

    return values


def _qkv(module: Any, arguments: tuple[Any, ...], output: tuple[Tensor, Any]) -> dict[str, Tensor]:
    heads, groups = module.num_heads * module.head_size, module.num_kv_heads * module.head_size
    names = ("q_projection", "k_projection", "v_projection")
    return dict(zip(names, output[0].split((heads, groups, groups), dim=-1), strict=True))


def _rotated(module: nn.Module, arguments: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    return dict(zip(("q_rotated", "k_rotated"), output, strict=True))


def _gate_up(module: nn.Module, arguments: tuple[Any, ...], output: tuple[Tensor, Any]) -> dict[str, Tensor]:
    return dict(zip(("mlp_gate", "mlp_up"), output[0].chunk(2, dim=-1), strict=True))


def _down(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> dict[str, Tensor]:
    return {"mlp_activation": arguments[0]}


_EMBEDDING = _whole("embedding")
_OF_LAYERS = {
    "input_layernorm": _norm("input_norm", "residual"),
    "self_attn.qkv_proj": _qkv,
    "self_attn.q_norm": _whole("q_norm"),
    "self_attn.k_norm": _whole("k_norm"),
    "self_attn.rotary_emb": _rotated,
    "self_attn.attn": _whole("attention"),
    "self_attn.o_proj": _whole("attention_projection"),
    "post_attention_layernorm": _norm("mlp_norm", "attention_residual"),
    "mlp.gate": _whole("router_logits"),
    "mlp.gate_up_proj": _gate_up,
    "mlp.down_proj": _down,
    "mlp": _whole("mlp"),
}
_OF_MODEL = {
    "embed_tokens": _EMBEDDING,
    "norm": _norm("final_norm", "final_residual"),
    "logits_processor": _whole("logits"),
}
