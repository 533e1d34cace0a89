"""Decode token by token as a server with `engine.exact` does, without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from dppo_megatron.engines import exact
from dppo_megatron.engines.serving import exact_environment

PROMPT = 5  # tokens that are read at once; the rest one by one


class Server:
    """Reads the files that vLLM and SGLang read, and calls `Operators` where they do."""

    def __init__(self, directory: Path, config: Any, dtype: torch.dtype):
        self._operators = exact.from_environment(exact_environment(config))
        self._config = json.loads((directory / "config.json").read_text())
        weights = load_file(directory / "model.safetensors")
        self._weights = {name: weight.to(dtype) for name, weight in weights.items()}
        self._size = self._config.get("head_dim") or self._config["hidden_size"] // self._config["num_attention_heads"]

    def scores(self, token_ids: Tensor, temperature: Tensor) -> Tensor:
        """[T] of each next token, 0 of the last."""
        self._cache: dict[int, tuple[Tensor, Tensor]] = {}
        steps = [token_ids[:PROMPT], *token_ids[PROMPT:].split(1)]
        logits = torch.cat([self._logits(step) for step in steps if len(step)])
        targets = torch.cat((token_ids[1:], token_ids[:1]))[:, None]
        return self._operators.logprobs(logits, targets, temperature)[:, 0]

    def _logits(self, token_ids: Tensor) -> Tensor:
        c, ours = self._config, self._operators
        x, stream = self._weights["model.embed_tokens.weight"][token_ids], None
        before = len(self._cache[0][0]) if self._cache else 0
        positions = before + torch.arange(len(token_ids))
        for number in range(c["num_hidden_layers"]):
            at = f"model.layers.{number}"
            x, stream = self._norm(f"{at}.input_layernorm", x, stream)
            heads, groups = c["num_attention_heads"], c["num_key_value_heads"]
            fused = self._layer("QKVParallelLinear", *(f"{at}.self_attn.{name}_proj" for name in "qkv"))
            fused.num_heads, fused.num_kv_heads, fused.head_size = heads, groups, self._size
            sizes = [n * self._size for n in (heads, groups, groups)]
            q, k, v = ours.linear(fused, x).split(sizes, dim=-1)
            if f"{at}.self_attn.q_norm.weight" in self._weights:
                q, k = (
                    self._norm(f"{at}.self_attn.{name}_norm", y.reshape(len(y), -1, self._size))[0].flatten(1)
                    for name, y in (("q", q), ("k", k))
                )
            q, k = ours._rotary(positions, q, k)
            x = self._attention(number, *(y.reshape(len(y), -1, self._size) for y in (q, k, v)))
            x = ours.linear(self._layer("RowParallelLinear", f"{at}.self_attn.o_proj"), x)
            x, stream = self._norm(f"{at}.post_attention_layernorm", x, stream)
            merged = self._layer("MergedColumnParallelLinear", f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj")
            merged.output_sizes = [c["intermediate_size"]] * 2
            x = ours.activation(ours.linear(merged, x))
            x = ours.linear(self._layer("RowParallelLinear", f"{at}.mlp.down_proj"), x)
        x, _ = self._norm("model.norm", x, stream)
        tied = self._weights["model.embed_tokens.weight"]
        return ours.head(x, self._weights.get("lm_head.weight", tied))

    def _attention(self, number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        old = self._cache.get(number, (key[:0], value[:0]))
        keys, values = self._cache[number] = tuple(torch.cat(pair) for pair in zip(old, (key, value), strict=True))
        lengths, counts = torch.tensor([len(keys)]), torch.tensor([len(query)])
        cached = (keys[None], values[None])
        return exact.attend(query, lambda requests, length: cached, lengths, counts, self._size**-0.5).flatten(1)

    def _norm(self, name: str, x: Tensor, stream: Tensor | None = None) -> tuple[Tensor, Tensor]:
        module = self._layer("RMSNorm", name)
        module.variance_epsilon = self._config["rms_norm_eps"]
        out = exact._norm(module, x, stream)
        return out if isinstance(out, tuple) else (out, x)

    def _layer(self, kind: str, *names: str) -> Any:
        made: Any = type(kind, (nn.Module,), {})()
        made.weight = torch.cat([self._weights[f"{name}.weight"] for name in names])
        return made
