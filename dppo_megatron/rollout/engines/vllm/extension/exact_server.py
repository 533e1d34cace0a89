"""Make a vLLM worker on a CPU compute products, attention and log-probs with `engines.exact`.

This module is imported only if the server's environment requests `engine.exact`. Otherwise vLLM is unchanged.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers import utils
from vllm.model_executor.model_loader import base_loader
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler

from dppo_megatron.rollout.engines.exact import Operators, attend

GREEDY = 1e-5  # vLLM treats lower temperatures as 0


def install(operators: Operators) -> None:
    """Replace vLLM's operators. Call it before the model is loaded."""
    process = base_loader.process_weights_after_loading

    def replaced(model: torch.nn.Module, model_config: Any, target_device: Any) -> None:
        operators.install(model)
        process(model, model_config, target_device)

    base_loader.process_weights_after_loading = replaced
    utils.dispatch_cpu_unquantized_gemm = partial(_keep_weight, operators)
    attention: Any = CPUAttentionBackendImpl
    attention.forward, attention.do_kv_cache_update = _attention, _cache
    _replace_logprobs(operators, Sampler)


def _keep_weight(operators: Operators, layer: Any, remove_weight: bool) -> None:
    """Use the weight itself instead of a packed copy for vLLM's own kernels."""
    layer.cpu_linear = lambda x, weight, bias: operators.linear(layer, x, bias)


def _cache(self: Any, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store the keys, then the values, of each position in vLLM's pages [blocks, g, size, 2 d], in position order."""
    size, d = kv_cache.shape[2], key.shape[-1]
    valid = slot_mapping >= 0
    slots = slot_mapping[valid]
    kv = torch.cat((key[: len(valid)][valid], value[: len(valid)][valid]), dim=-1)
    kv_cache[slots // size, :, slots % size] = kv.view(len(slots), -1, 2 * d)


def _attention(
    self: Any,
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    attn_metadata: CPUAttentionMetadata | None,
    output: Tensor,
    *_: Any,
    **__: Any,
) -> Tensor:
    if attn_metadata is None:  # a vLLM warm-up
        return output
    size, table = kv_cache.shape[2], attn_metadata.block_table.long()
    counts = attn_metadata.query_start_loc.diff().long()
    tokens = attn_metadata.num_actual_tokens

    def cached(requests: Tensor, length: int) -> tuple[Tensor, Tensor]:
        places = torch.arange(length)
        pages = table[requests][:, places // size]
        keys, values = kv_cache[pages, :, places % size].chunk(2, dim=-1)
        return keys, values

    lengths = attn_metadata.seq_lens.long()[: len(counts)]
    output[:tokens] = attend(query[:tokens], cached, lengths, counts, self.scale)
    return output


def _replace_logprobs(operators: Operators, sampler: Any) -> None:
    """Compute reported log-probs with `operators`, from the logits before temperature. The sampler draws as before."""
    forward, gather = sampler.forward, sampler.gather_logprobs

    def sampled(self: Any, logits: Tensor, sampling_metadata: Any, *arguments: Any, **options: Any) -> Any:
        temperature = sampling_metadata.temperature
        if temperature is not None:
            temperature = torch.where(temperature < GREEDY, 1.0, temperature)
        self.dppo_drawn_from = (logits.float().clone(), temperature)
        try:
            return forward(self, logits, sampling_metadata, *arguments, **options)
        finally:
            self.dppo_drawn_from = None

    def gathered(self: Any, values: Tensor, number: int, token_ids: Tensor) -> LogprobsTensors:
        """Return vLLM's tokens with log-probs from `operators`.

        values: log-probs of the sampled distribution, or for a prompt the logits, at temperature 1.
        """
        logprobs_tensors = gather(values, number, token_ids)
        logits, temperature = getattr(self, "dppo_drawn_from", None) or (values, None)
        logprobs = operators.logprobs(logits, logprobs_tensors.logprob_token_ids, temperature)
        return logprobs_tensors._replace(logprobs=logprobs)

    sampler.forward, sampler.gather_logprobs = sampled, gathered
    sampler.compute_logprobs = staticmethod(lambda logits: logits.float())
