"""Make a stock SGLang server on a CPU compute products, attention and log-probs with `engines.exact`.

The plug-in imports this module, and SGLang is hooked, only if the server's environment requests `engine.exact`. It
imports only modules that depend only on torch, because the SGLang environment lacks our other packages.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dppo_megatron.rollout.engines.exact import attend, from_environment


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    ours = from_environment()
    backend = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    hooks = {
        f"{backend}._run_sdpa_forward_extend": partial(attended, True),
        f"{backend}._run_sdpa_forward_decode": partial(attended, False),
        "sglang.srt.layers.sampler.Sampler.forward": partial(sample, ours),
        "sglang.srt.layers.logprob_processor.InputLogprobProcessor.forward": partial(score, ours),
    }
    hooks["sglang.srt.model_loader.loader.DefaultModelLoader.load_model"] = partial(load_model, ours, tuple(hooks))
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def load_model(ours: Any, hooked: Iterable[str], original: Callable[..., Any], loader: Any, **options: Any) -> Any:
    for target in hooked:  # SGLang ignores a hook that it cannot apply
        if not hasattr(pkgutil.resolve_name(target), "__wrapped__"):
            raise RuntimeError(f"engine.exact: {target} was not hooked")
    model = original(loader, **options)
    ours.install(model)
    for module in model.modules():
        kind = type(module).__name__
        if kind == "LogitsProcessor":
            module._compute_lm_head = lambda hidden, head, *_, **__: ours.head(hidden, head.weight)
        elif kind.endswith("ParallelLinear"):
            module.quant_method = Product(module.quant_method, ours)
    return model


class Product:
    """Replaces a layer's quantization method, so that the layer multiplies as the trainer does."""

    def __init__(self, method: Any, ours: Any):
        self._method, self.apply = method, ours.linear

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)


def attended(extends: bool, original: Any, backend: Any, *passed: Tensor, scaling: float, **options: Any) -> Tensor:
    """Write the attention output of all requests to `output` and return it.

    With `extends` requests have several new tokens, otherwise a single token each.
    """
    query, output, keys, values, slots, requests, lengths, *extend_lengths = passed
    counts = extend_lengths[1] if extends else torch.ones_like(lengths)
    places = slots[requests]  # [n, ...]: the cache slot at each position of a request

    def cached(requests: Tensor, length: int) -> tuple[Tensor, Tensor]:
        cache_slots = places[requests, :length].long()
        return keys[cache_slots], values[cache_slots]

    output[:] = attend(query, cached, lengths.long(), counts.long(), scaling)
    return output


def sample(ours: Any, original: Callable[..., Tensor], *arguments: Any, **options: Any) -> Tensor:
    """Let the sampler draw as before, and compute the reported log-probs from the logits before temperature."""
    _, output, sampling_info, return_logprob, numbers, *_ = arguments
    logits = output.next_token_logits.float().clone() if return_logprob else None
    token_ids = original(*arguments, **options)
    if logits is None:
        return token_ids
    temperature = sampling_info.temperatures.flatten()
    values, topk_ids = output.next_token_top_logprobs_val, output.next_token_top_logprobs_idx
    for number in set(numbers):
        rows = [row for row, k in enumerate(numbers) if k == number]
        ids = token_ids[rows].long()[:, None]
        if number:
            ids = torch.cat((ids, torch.stack([torch.as_tensor(topk_ids[row]) for row in rows]).long()), dim=1)
        logprobs = ours.logprobs(logits[rows], ids, temperature[rows])
        output.next_token_logprobs[rows] = logprobs[:, 0]
        for row, topk_logprobs in zip(rows, logprobs[:, 1:], strict=True):
            if number:
                values[row] = topk_logprobs
    return token_ids


def score(ours: Any, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Replace the log-probs of prompt tokens by the trainer's, at temperature 1."""
    compute, indices = options["get_logits_fn"], options["input_logprob_indices"]
    logits_chunks: list[Tensor] = []

    def logits_of(*args: Any, **kwargs: Any) -> Tensor:
        logits_chunks.append(compute(*args, **kwargs))
        return logits_chunks[-1]

    result, sampled = original(*arguments, **{**options, "get_logits_fn": logits_of})
    if len(indices):
        ids = options["logits_metadata"].extend_input_logprob_token_ids_gpu.long()[:, None]
        result.token_logprobs = ours.logprobs(torch.cat(logits_chunks)[indices], ids)[:, 0]
    return result, sampled
