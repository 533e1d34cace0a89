"""Bytes between the client and the server's routes: a request is JSON, a reply with arrays is safetensors.

What is no array (finish reasons, ids) is JSON in the metadata of the safetensors, under "header".
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from dppo_megatron.engines.protocol import GenerateRequest

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
