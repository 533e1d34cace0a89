"""Encode requests to SGLang's `/generate`, and decode each reply as a group of samples.

Token ids, log-probs of sampled tokens and sampling masks arrive as JSON. Routed experts arrive as base64 arrays. So
does the top K, except over sampling masks and for scored prompts.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import torch

from dppo_megatron.hf import HFModelConfig
from dppo_megatron.rollout.engines.protocol import GenerateRequest
from dppo_megatron.rollout.engines.samples import GroupSamples, absent_experts, parse_version
from dppo_megatron.rollout.engines.trace import Trace
from dppo_megatron.types import Rollout

# At temperature 0 SGLang draws the whole batch another way, so a seeded sample would depend on the batch. This is the
# lowest temperature that SGLang accepts: probabilities of tokens that are 1e-4 nats apart differ by a factor of e**50.
GREEDY_TEMPERATURE = 2e-6
# Label prefixes for weights that sleep discarded: while asleep, and awake again. The last version follows the prefix.
ASLEEP, EMPTY = "asleep-", "empty-"


def child_ids(request_id: str, n: int) -> list[str]:
    """Return the id of the SGLang request for each sample, such as "7#0;" and "7#1;".

    Aborting an id aborts every id with that prefix, so each id ends in a mark.
    """
    return [f"{request_id}#{index};" for index in range(n)]


def encode_group(request: GenerateRequest, max_tokens: int) -> dict[str, Any]:
    """Return the request body for a batch of `n` requests that differ only in the seed."""
    sampling = {
        "temperature": request.temperature or GREEDY_TEMPERATURE,
        "top_p": request.top_p,
        "top_k": request.top_k or -1,
        "min_p": request.min_p,
        "max_new_tokens": max_tokens,
        # False: the model directory's end tokens also stop a request. True: no token stops it.
        "ignore_eos": not request.stop_token_ids,
        "stop_token_ids": list(request.stop_token_ids),
    }
    body: dict[str, Any] = {
        "rid": child_ids(request.request_id, request.n),
        "input_ids": [request.token_ids.tolist()] * request.n,
        "sampling_params": [{**sampling, "sampling_seed": seed} for seed in request.seeds],
        "return_logprob": True,
        "top_logprobs_num": request.topk,
    }
    if request.sampling_mask:  # SGLang's other log-probs are over the whole vocabulary
        body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "support", "top_logprobs_num": 0}
    elif request.topk:
        body |= {"return_flat_raw_output_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True}
    if request.routed_experts:
        body["return_routed_experts"] = True
    return body


def encode_score(token_ids: list[int], topk: int = 0) -> dict[str, Any]:
    """Return the request body that scores `token_ids`, with the top K at each position.

    SGLang cannot sample zero tokens, so it samples one, at temperature 1 like all tokens in the batch.
    """
    return {
        "input_ids": token_ids,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 1, "ignore_eos": True, "sampling_seed": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": topk,
    }


def decode_group(reply: bytes | bytearray, request: GenerateRequest, model: HFModelConfig) -> GroupSamples:
    """Decode the samples in a reply to `encode_group`, in order. Raises ValueError for any other reply."""
    outputs = _load(reply)
    if not isinstance(outputs, list) or len(outputs) != request.n:
        raise ValueError(f"expected {request.n} samples, got {reply[:200]!r}")
    ids = child_ids(request.request_id, request.n)
    try:
        samples = [_decode(output, name, request, model) for output, name in zip(outputs, ids, strict=True)]
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"a sample has a missing or invalid field: {error}") from error
    return GroupSamples.from_rollouts(samples)


def decode_score(reply: bytes | bytearray, token_ids: list[int], vocab_size: int, topk: int = 0) -> GroupSamples:
    """Return tokens 1.. as a sample with log-probs, top K, and the policy version that scored them.

    Raises ValueError for any other reply.
    """
    output = _load(reply)
    # SGLang scores the last vocabulary token correctly but reports id 0 for it.
    named = [token if token < vocab_size - 1 else 0 for token in token_ids]
    try:
        meta = output["meta_info"]
        entries = meta["input_token_logprobs"]
        if [entry[1] for entry in entries] not in (token_ids, named):
            raise ValueError("the scored tokens differ from the ones that were sent")
        labels = [meta["weight_version"], *(span["version"] for span in meta.get("weight_versions") or ())]
        scored_ids, length = np.array(token_ids[1:], np.int32), np.array([len(token_ids) - 1], np.int32)
        columns = {"versions": np.full_like(scored_ids, min(map(parse_version, labels)))}
        columns["rollout_logprob"] = _floats([entry[0] for entry in entries[1:]])
        if topk:
            lists = np.array([[entry[:2] for entry in at] for at in meta["input_top_logprobs"][1:]], np.float64)
            columns |= {"topk_ids": lists[..., 1].astype(np.int32), "rollout_topk_logprob": _floats(lists[..., 0])}
        return GroupSamples(length, ("length",), scored_ids, columns)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"the reply lacks or garbles {error}") from error


def reported_version(label: str) -> int:
    """Return the policy version in a label.

    While an engine sleeps, and until it loads weights again, this is the version of the discarded weights, as in vLLM.
    """
    return parse_version(label.removeprefix(ASLEEP).removeprefix(EMPTY))


def _decode(output: dict[str, Any], name: str, request: GenerateRequest, model: HFModelConfig) -> Rollout:
    meta = output["meta_info"]
    if meta["id"] != name:
        raise ValueError(f"expected the answer to {name!r}, got that to {meta['id']!r}")
    tokens = output["output_ids"]
    entries = meta["output_token_logprobs"]
    if [entry[1] for entry in entries] != tokens:
        raise ValueError(f"{name}: the log-probs belong to other tokens")
    length = len(tokens)
    columns = {"versions": _versions(meta.get("weight_versions"), length)}
    if request.sampling_mask:
        columns |= _over_mask(name, meta, tokens, request.topk)
    else:
        columns["rollout_logprob"] = _floats([entry[0] for entry in entries])
        if request.topk:
            columns |= _topk(meta, length, request.topk)
    if request.routed_experts:
        columns["routed_experts"] = _experts(meta, length, len(request.token_ids), model)
    return Rollout.from_columns(
        columns, token_ids=np.array(tokens, np.int32), finish_reason=_finish_reason(meta["finish_reason"], tokens)
    )


def _over_mask(name: str, meta: dict[str, Any], tokens: list[int], k: int) -> dict[str, np.ndarray]:
    """Return the sampling masks, with log-probs over them for the sampled tokens and the K most likely tokens."""
    masks, values = (meta[f"output_token_sampling_{field}"] if tokens else [] for field in ("mask", "logprobs"))
    if not len(masks) == len(values) == len(tokens) or any(map(lambda m, v: len(m) != len(v), masks, values)):
        raise ValueError(f"{name}: the sampling mask of some of its tokens is missing")
    sampled = np.full(len(tokens), np.nan, np.float32)
    topk_ids, topk_logprob = np.full((len(tokens), k), -1, np.int32), np.full((len(tokens), k), -np.inf, np.float32)
    mask_ids = [np.empty(0, np.int32)]
    for row, (token, mask, value) in enumerate(zip(tokens, masks, values, strict=True)):
        ids, logprobs = np.array(mask, np.int32), _floats(value)
        order = np.argsort(-logprobs, kind="stable")[:k]
        topk_ids[row, : len(order)], topk_logprob[row, : len(order)] = ids[order], logprobs[order]
        if token in mask:
            sampled[row] = logprobs[mask.index(token)]
        mask_ids.append(np.sort(ids))
    return {
        "rollout_logprob": sampled,
        **({"topk_ids": topk_ids, "rollout_topk_logprob": topk_logprob} if k else {}),
        "sampling_mask_ids": np.concatenate(mask_ids),
        "sampling_mask_counts": np.array([len(mask) for mask in masks], np.int32),
    }


def _finish_reason(reason: dict[str, Any], tokens: list[int]) -> str:
    # A step with NaN ends with reason "stop", an invented last token, and "NaN happened" as the matched text.
    if reason["type"] == "stop" and (not tokens or reason.get("matched") != tokens[-1]):
        return f"stop at {reason.get('matched')!r}"
    return str(reason["type"])


def _topk(meta: dict[str, Any], length: int, k: int) -> dict[str, np.ndarray]:
    if not length:
        return {"topk_ids": np.empty((0, k), np.int32), "rollout_topk_logprob": np.empty((0, k), np.float32)}
    kinds = meta["output_top_logprobs_idx_flat_b64_dtype"], meta["output_top_logprobs_val_flat_b64_dtype"]
    first = meta["output_top_logprobs_null_prefix"]
    if kinds != ("int32", "float32") or first:
        raise ValueError(f"top-K log-probs have dtypes {kinds} and begin at token {first}, not int32, float32 and 0")
    return {
        column: _array(meta[f"output_top_logprobs_{name}_flat_b64"], dtype).reshape(length, k)
        for column, name, dtype in (("topk_ids", "idx", "<i4"), ("rollout_topk_logprob", "val", "<f4"))
    }


def _experts(meta: dict[str, Any], length: int, prompt_tokens: int, model: HFModelConfig) -> np.ndarray:
    """Return the routed experts without the dense layers. SGLang reports all layers."""
    if (moe := model.moe) is None:
        raise ValueError("the model has no experts")
    layers = [layer for layer in range(model.num_layers) if model.is_moe_layer(layer)]
    if not length:
        return absent_experts(prompt_tokens, len(layers), moe.top_k)
    shape = (prompt_tokens + length - 1, model.num_layers, moe.top_k)
    experts = _array(meta["routed_experts"], "<i4").reshape(shape)[:, layers]
    if experts.min() < 0 or experts.max() >= moe.num_experts:
        raise ValueError(f"routed experts outside [0, {moe.num_experts})")
    return experts.astype(np.uint8 if moe.num_experts <= 256 else np.uint16)


def _versions(spans: list[dict[str, Any]] | None, length: int) -> np.ndarray:
    """Return the policy version of each token, [length] int32; -1 where the weights have no version of this run."""
    versions = np.full(length, -1, dtype=np.int32)
    for span in spans or ():
        versions[span["start"] : span["end"]] = parse_version(span["version"])
    return versions


def _array(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text, validate=True), dtype=dtype)


def _floats(values: Any) -> np.ndarray:
    """Return fp32 values. SGLang sends NaN as null, which becomes NaN again."""
    return np.array(values, dtype=np.float32)


def _load(reply: bytes | bytearray) -> Any:
    try:
        return json.loads(reply)
    except ValueError as error:
        raise ValueError(f"not JSON ({error}): {reply[:200]!r}") from error


def decode_trace(report: dict[str, str]) -> Trace:
    """Decode the values that a worker recorded, from the plug-in's report.

    Raises ValueError or torch's errors for any other report.
    """
    trace: Trace = {}
    for name, text in report.items():
        layer, operator = name.split("/")
        dtype, shape, bits = text.split(" ")
        flat = torch.frombuffer(bytearray(base64.b64decode(bits, validate=True)), dtype=getattr(torch, dtype))
        trace[int(layer), operator] = flat.reshape([int(size) for size in shape.split("x")])
    return trace
