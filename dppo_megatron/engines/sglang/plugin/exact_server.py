"""Implements `engine.exact` in a stock SGLang server on a CPU: products, attention and log-probs by `engines.exact`.

This module is loaded, and SGLang is hooked, only if the server's environment requests it. SGLang's own environment has
no dppo_megatron, so `operators` makes a package of the folders. It imports only modules that depend only on torch.
"""

import importlib.util
import pkgutil
import sys
from functools import partial
from pathlib import Path

import torch

PACKAGE = Path(__file__).parents[3]


def operators():
    """Return the operators that the server's environment requests."""
    if PACKAGE.name not in sys.modules:
        spec = importlib.util.spec_from_file_location(PACKAGE.name, PACKAGE / "__init__.py")
        sys.modules[PACKAGE.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[PACKAGE.name])
    from dppo_megatron.engines.exact import from_environment

    return from_environment()


def register(ours):
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    backend = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    hooks = {
        f"{backend}._run_sdpa_forward_extend": extend,
        f"{backend}._run_sdpa_forward_decode": decode,
        "sglang.srt.layers.sampler.Sampler.forward": partial(sample, ours),
        "sglang.srt.layers.logprob_processor.InputLogprobProcessor.forward": partial(score, ours),
    }
    hooks["sglang.srt.model_loader.loader.DefaultModelLoader.load_model"] = partial(load_model, ours, tuple(hooks))
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def load_model(ours, hooked, original, loader, **options):
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
    """Replaces a layer's quantization method, to multiply as the trainer does."""

    def __init__(self, method, ours):
        self._method, self.apply = method, ours.linear

    def __getattr__(self, name):
        return getattr(self._method, name)


def extend(
    original,
    backend,
    query,
    output,
    keys,
    values,
    req_to_token,
    req_pool_indices,
    seq_lens,
    extend_prefix_lens,
    extend_seq_lens,
    *_,
    scaling=None,
    **__,
):
    return attended(query, output, keys, values, req_to_token[req_pool_indices], seq_lens, extend_seq_lens, scaling)


def decode(
    original, backend, query, output, keys, values, req_to_token, req_pool_indices, seq_lens, *_, scaling=None, **__
):
    ones = torch.ones_like(seq_lens)
    return attended(query, output, keys, values, req_to_token[req_pool_indices], seq_lens, ones, scaling)


def attended(query, output, keys, values, places, lengths, counts, scale):
    """Write the attention output of all requests to `output` and return it.

    places [n, ...]: the cache slot of each position of a request.
    """
    from dppo_megatron.engines.exact import attend

    def cached(requests, length):
        found = places[requests, :length].long()
        return keys[found], values[found]

    output[:] = attend(query, cached, lengths.long(), counts.long(), scale)
    return output


def sample(ours, original, sampler, logits_output, sampling_info, return_logprob, top_logprobs_nums, *rest, **options):
    """Let the sampler draw as before, and compute the reported log-probs from the logits before temperature."""
    logits = logits_output.next_token_logits.float().clone() if return_logprob else None
    drawn = original(sampler, logits_output, sampling_info, return_logprob, top_logprobs_nums, *rest, **options)
    if logits is None:
        return drawn
    temperature = sampling_info.temperatures.flatten()
    values, found = logits_output.next_token_top_logprobs_val, logits_output.next_token_top_logprobs_idx
    for number in set(top_logprobs_nums):
        rows = [row for row, own in enumerate(top_logprobs_nums) if own == number]
        ids = drawn[rows].long()[:, None]
        if number:
            ids = torch.cat((ids, torch.stack([torch.as_tensor(found[row]) for row in rows]).long()), dim=1)
        logprobs = ours.logprobs(logits[rows], ids, temperature[rows])
        logits_output.next_token_logprobs[rows] = logprobs[:, 0]
        for row, of_row in zip(rows, logprobs[:, 1:], strict=True):
            if number:
                values[row] = of_row
    return drawn


def score(ours, original, processor, *arguments, get_logits_fn, logits_metadata, input_logprob_indices, **options):
    """Replace the log-probs of a prompt's tokens by the trainer's, at temperature 1."""
    seen = []

    def logits_of(*given, **how):
        seen.append(get_logits_fn(*given, **how))
        return seen[-1]

    result, sampled = original(
        processor,
        *arguments,
        get_logits_fn=logits_of,
        logits_metadata=logits_metadata,
        input_logprob_indices=input_logprob_indices,
        **options,
    )
    if len(input_logprob_indices):
        logits = torch.cat(seen)[input_logprob_indices]
        ids = logits_metadata.extend_input_logprob_token_ids_gpu.long()[:, None]
        result.token_logprobs = ours.logprobs(logits, ids)[:, 0]
    return result, sampled
