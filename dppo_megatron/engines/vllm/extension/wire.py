"""Bytes on the wire between the client and the server's routes.

A request is JSON. A reply is one frame: the magic `DPPO`, the header's length as little-endian uint32, the header as
JSON padded with spaces to a multiple of 8 bytes, then each array of `header["arrays"]` (`[name, dtype, shape]`) raw,
little-endian, C order, one after the other. Nothing may follow.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from dppo_megatron.engines.protocol import GenerateRequest

MAGIC = b"DPPO"
MEDIA_TYPE = "application/x-dppo-frame"
_PREFIX = len(MAGIC) + 4
_DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("int32", "float32", "uint8", "uint16")}


def encode_frame(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> bytes:
    """Header and arrays (of `_DTYPES`) as one frame."""
    layout = [[name, array.dtype.name, list(array.shape)] for name, array in arrays.items()]
    text = json.dumps({**header, "arrays": layout}).encode()
    text += b" " * (-(len(text) + _PREFIX) % 8)
    parts = [MAGIC, len(text).to_bytes(4, "little"), text]
    parts += [np.ascontiguousarray(array, dtype=_DTYPES[array.dtype.name]).tobytes() for array in arrays.values()]
    return b"".join(parts)


def decode_frame(frame: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Header and read-only array views of `frame`. Raises ValueError for anything that is not exactly one frame."""
    if frame[: len(MAGIC)] != MAGIC:
        raise ValueError(f"not a frame: it begins with {frame[:16]!r}")
    start = _PREFIX + int.from_bytes(frame[len(MAGIC) : _PREFIX], "little")
    if start > len(frame):
        raise ValueError(f"frame cut inside its header ({len(frame)} bytes)")
    try:
        header = json.loads(frame[_PREFIX:start])
        layout = [(str(name), _DTYPES[dtype], tuple(map(int, shape))) for name, dtype, shape in header.pop("arrays")]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"malformed frame header: {error!r}") from error
    arrays = {}
    for name, dtype, shape in layout:
        count = math.prod(shape)
        end = start + count * dtype.itemsize
        if min(shape, default=0) < 0 or end > len(frame):
            raise ValueError(f"frame cut inside array {name!r} of shape {shape} ({len(frame)} bytes)")
        arrays[name] = np.frombuffer(frame, dtype=dtype, count=count, offset=start).reshape(shape)
        start = end
    if start != len(frame):
        raise ValueError(f"{len(frame) - start} bytes too many after the last array")
    return header, arrays


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
        }
    ).encode()


def decode_request(body: bytes) -> GenerateRequest:
    """Raises ValueError with the reason."""
    try:
        return GenerateRequest(**json.loads(body))
    except (TypeError, OverflowError) as error:
        raise ValueError(f"malformed generate request: {error}") from error
