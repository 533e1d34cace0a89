"""Bytes between the client and the server's routes: a request is JSON, a reply with arrays is safetensors.

What is no array (finish reasons, ids) is JSON in the metadata of the safetensors, under "header".
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load, save

from dppo_megatron.engines.protocol import GenerateRequest
from dppo_megatron.engines.trace import Trace

MEDIA_TYPE = "application/x-safetensors"


def encode_reply(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> bytes:
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    return save(contiguous, metadata={"header": json.dumps(header)})


def decode_reply(reply: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Header and arrays. Raises ValueError for anything that `encode_reply` does not return."""
    try:
        arrays = load(reply)
        metadata_size = int.from_bytes(reply[:8], "little")
        metadata = json.loads(reply[8 : 8 + metadata_size])["__metadata__"]
        return dict(json.loads(metadata["header"])), arrays
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not safetensors with a header ({error!r}); it begins with {reply[:16]!r}") from error


def encode_request(request: GenerateRequest) -> bytes:
    return json.dumps(
        {
            "request_id": request.request_id,
            "token_ids": request.token_ids.tolist(),
            "n": request.n,
            "seeds": request.seeds,
            "temperature": request.temperature,
            "max_tokens": request.max_tokens,
            "stop_token_ids": request.stop_token_ids,
            "topk": request.topk,
            "routed_experts": request.routed_experts,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "min_p": request.min_p,
            "kept": request.kept,
        }
    ).encode()


def encode_trace(logprobs: np.ndarray, workers: list[list[tuple[int, str, bytes, str, tuple[int, ...]]]]) -> bytes:
    """What every worker recorded (`WorkerExtension.dppo_take_trace`), and the log-probs of the same pass."""
    arrays, dtypes = {"logprobs": logprobs}, {}
    for worker, values in enumerate(workers):
        for layer, operator, bits, dtype, shape in values:
            name = f"{worker}/{layer}/{operator}"
            arrays[name] = np.frombuffer(bits, dtype=f"int{8 * getattr(torch, dtype).itemsize}").reshape(shape)
            dtypes[name] = dtype
    return encode_reply({"dtypes": dtypes, "workers": len(workers)}, arrays)


def decode_trace(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> list[Trace]:
    """The traces of all workers. Raises KeyError, TypeError, ValueError, AttributeError or RuntimeError for others."""
    traces: list[Trace] = [{} for _ in range(header["workers"])]
    for name, dtype in header["dtypes"].items():
        worker, layer, operator = name.split("/")
        bits = torch.from_numpy(arrays[name].copy())
        traces[int(worker)][int(layer), operator] = bits.view(getattr(torch, dtype))
    return traces


def bits_of(value: torch.Tensor) -> np.ndarray:
    """numpy has no bfloat16."""
    return value.contiguous().view(getattr(torch, f"int{8 * value.dtype.itemsize}")).numpy()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
