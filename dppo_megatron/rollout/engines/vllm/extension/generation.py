"""Sample and score through vLLM's engine client, with results as flat arrays instead of dicts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
from vllm.engine.protocol import EngineClient
from vllm.inputs.engine import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
from vllm.sampling_params import RequestOutputKind, SamplingParams

from dppo_megatron.rollout.engines.protocol import GenerateRequest
from dppo_megatron.rollout.engines.samples import GroupSamples, parse_version

from .drafts import GIVEN
from .experts import RECORDED, ExpertsReader
from .sampling_masks import RECORDED as MASKS
from .sampling_masks import MaskReader


async def sample_group(
    engine: EngineClient,
    request: GenerateRequest,
    experts: ExpertsReader,
    masks: MaskReader,
    adapter: LoRARequest | None,
    drafts: bool = False,
) -> GroupSamples:
    """Return all samples of a group. If the call is canceled or a sample fails, the engine aborts the other samples.

    `drafts` states whether the workers draft (`drafts.py`). Each sample is a separate request, because for `n` above 1
    vLLM numbers the seeds itself.
    """
    prompt = request.token_ids.tolist()
    names = child_ids(request)
    if request.scored:
        return await score(engine, request.token_ids, names[0], masks, adapter, request.topk)
    try:
        params = [_params(request, seed, experts, masks) for seed in request.seeds]
        if drafts:
            for index, sample_params in enumerate(params):
                sequences = [] if index else [tokens.tobytes() for tokens in request.drafts]
                sample_params.extra_args = {**(sample_params.extra_args or {}), GIVEN: sequences}
        outputs = await _finals(engine, prompt, params, names, adapter)
        samples = [output.outputs[0] for output in outputs]
        recorded: dict[str, np.ndarray] = {}
        if request.routed_experts:
            recorded["routed_experts"] = await experts.read(samples, names, len(prompt))
        if request.sampling_mask:
            sets = await masks.read(samples, names, len(prompt))
            recorded |= zip(("sampling_mask_ids", "sampling_mask_counts"), sets, strict=True)
    except BaseException:
        if request.routed_experts:
            await experts.forget(names)
        if request.sampling_mask:
            await masks.forget(names)
        raise
    return replace(_flatten(samples, request.topk, recorded), counts=_counts(outputs, len(prompt)))


def child_ids(request: GenerateRequest) -> list[str]:
    """Return the id of the vLLM request for each sample."""
    end = RECORDED if request.routed_experts else ""
    return [f"{request.request_id}/{index}{end}" for index in range(request.n)]


async def score(
    engine: EngineClient,
    token_ids: np.ndarray,
    name: str,
    masks: MaskReader,
    adapter: LoRARequest | None,
    topk: int = 0,
) -> GroupSamples:
    """Return tokens 1.. of `token_ids` [S] as a sample that continues token 0, with log-probs at temperature 1."""
    params = SamplingParams(
        **_greedy(masks),
        max_tokens=1,
        prompt_logprobs=topk,
        flat_logprobs=True,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_reading_prefix_cache=True,  # cached keys and values skip positions, and may come from other weights
    )
    output = await _final(engine, token_ids.tolist(), params, name, adapter)
    flat = output.prompt_logprobs
    assert isinstance(flat, FlatLogprobs)  # because of flat_logprobs=True
    # Position 0 has no entry. Every other position has the prompt token and the K most likely tokens.
    shape = (len(token_ids) - 1, topk + 1)
    ids = np.array(flat.token_ids, np.int32).reshape(shape)
    _check_owners(ids, token_ids[1:])
    logprobs = np.array(flat.logprobs, np.float32).reshape(shape)
    version = _versions([output.outputs[0].weight_versions or ()], np.ones(1, np.int32))
    columns = {"rollout_logprob": logprobs[:, 0], "versions": np.repeat(version, len(ids))}
    if topk:
        columns |= {"topk_ids": ids[:, 1:], "rollout_topk_logprob": logprobs[:, 1:]}
    return GroupSamples(np.array([len(ids)], np.int32), ("length",), ids[:, 0], columns)


def _greedy(masks: MaskReader) -> dict[str, Any]:
    """Return the sampling parameters for greedy decoding: temperature 0, or top-k 1 if vLLM returns sampling masks.

    vLLM rejects temperature 0 together with sampling masks.
    """
    return {"temperature": 1.0, "top_k": 1} if masks.native else {"temperature": 0.0}


def _params(request: GenerateRequest, seed: int, experts: ExpertsReader, masks: MaskReader) -> SamplingParams:
    sampling = {name: getattr(request, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    return SamplingParams(
        **(sampling if request.temperature else _greedy(masks)),
        max_tokens=request.max_tokens,
        seed=seed if request.temperature else None,
        stop_token_ids=list(request.stop_token_ids),
        ignore_eos=True,  # only the request's stop tokens stop it, not the model directory's
        logprobs=request.topk,
        flat_logprobs=True,
        extra_args={MASKS: True} if request.sampling_mask else None,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # no other sample uses these parameters
        # vLLM does not route cached positions again, so our recording of routes disables the prefix cache.
        skip_reading_prefix_cache=(request.routed_experts and not experts.native) or None,
    )


async def _finals(
    engine: EngineClient,
    prompt: list[int],
    params: list[SamplingParams],
    names: list[str],
    adapter: LoRARequest | None,
) -> list[RequestOutput]:
    try:
        async with asyncio.TaskGroup() as tasks:
            children = [
                tasks.create_task(_final(engine, prompt, sample_params, name, adapter))
                for sample_params, name in zip(params, names, strict=True)
            ]
    except ExceptionGroup as error:
        raise error.exceptions[0] from None
    return [child.result() for child in children]


async def _final(
    engine: EngineClient, prompt: list[int], params: SamplingParams, request_id: str, adapter: LoRARequest | None
) -> RequestOutput:
    answer = engine.generate(tokens_input(prompt), params, request_id, lora_request=adapter)
    outputs = [output async for output in answer]
    if not outputs or not outputs[-1].finished:
        raise RuntimeError(f"request {request_id} ended without a result")
    return outputs[-1]


def _counts(outputs: Sequence[RequestOutput], prompt_tokens: int) -> dict[str, int]:
    """Count the work for the samples of a group, by the names in `Engine.counts`."""
    samples = [output.outputs[0] for output in outputs]
    drafts = [sample.spec_decode_metrics for sample in samples if sample.spec_decode_metrics is not None]
    return {
        "prompt_tokens": prompt_tokens * len(outputs),
        "cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs),
        "sampled_tokens": sum(len(sample.token_ids) for sample in samples),
        "draft_steps": sum(sum(metrics.histogram) for metrics in drafts),
        "drafted": sum(metrics.num_draft_tokens for metrics in drafts),
        "accepted": sum(number * steps for metrics in drafts for number, steps in enumerate(metrics.histogram)),
    }


def _flatten(samples: list[CompletionOutput], k: int, recorded: dict[str, np.ndarray]) -> GroupSamples:
    """Return the samples as flat arrays. `recorded` has the columns that are not in vLLM's outputs."""
    lengths = np.asarray([len(sample.token_ids) for sample in samples], dtype=np.int32)
    reported = [sample.logprobs for sample in samples if isinstance(sample.logprobs, FlatLogprobs)]
    ids, logprobs = _columns(reported, lengths.tolist(), k)
    token_ids = np.fromiter(chain.from_iterable(sample.token_ids for sample in samples), np.int32, lengths.sum())
    _check_owners(ids, token_ids)
    # Column 0 is the sampled token. The K most likely tokens follow, with id -1 if they cannot be drawn.
    ids[np.isneginf(logprobs)] = -1
    versions = _versions([sample.weight_versions or () for sample in samples], lengths)
    columns = {"rollout_logprob": logprobs[:, 0], "versions": versions, **recorded}
    if k:
        columns |= {"topk_ids": ids[:, 1:], "rollout_topk_logprob": logprobs[:, 1:]}
    return GroupSamples(
        lengths=lengths,
        finish_reasons=tuple(sample.finish_reason or "" for sample in samples),
        token_ids=token_ids,
        columns=columns,
    )


def _columns(flat_logprobs: Sequence[FlatLogprobs], positions: Sequence[int], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ids int32 and log-probs fp32, [positions of all samples, k + 1]. The sampled token comes first.

    `positions` has the number of positions in each sample. Raises ValueError if vLLM reports other numbers.
    """
    if (reported := list(map(len, flat_logprobs))) != list(positions):
        raise ValueError(f"log-probs of {reported} positions, expected {list(positions)}")
    shape = (sum(positions), k + 1)
    ids = np.fromiter(chain.from_iterable(flat.token_ids for flat in flat_logprobs), np.int32).reshape(shape)
    return ids, np.fromiter(chain.from_iterable(flat.logprobs for flat in flat_logprobs), np.float32).reshape(shape)


def _check_owners(ids: np.ndarray, token_ids: np.ndarray) -> None:
    """Raise RuntimeError unless the first of the `ids` at each position, [positions, k + 1], is the token there."""
    if (wrong := np.flatnonzero(ids[:, 0] != token_ids)).size:
        place = int(wrong[0])
        raise RuntimeError(
            f"the log-probs at {len(wrong)} of {len(ids)} positions belong to other tokens, first at position {place}: "
            f"{ids[place, 0]} instead of {token_ids[place]}"
        )


def _versions(spans: Sequence[Sequence[WeightVersionSpan]], lengths: np.ndarray) -> np.ndarray:
    """Return the policy version of each token, [tokens of all samples] int32, from the samples' spans and lengths.

    The version is -1 where the weights have no version of this run.
    """
    ends = np.cumsum(lengths)
    versions = np.full(ends[-1], -1, dtype=np.int32)
    for sample_spans, start, end in zip(spans, (ends - lengths).tolist(), ends.tolist(), strict=True):
        for span in sample_spans:
            versions[start + span.start : min(start + span.end, end)] = parse_version(span.version)
    return versions
