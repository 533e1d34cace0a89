"""Encode the messages between client and server routes: JSON requests, and safetensors replies with arrays.

Values that are not arrays (finish reasons, ids) are JSON in the safetensors metadata, under "header".
"""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save

from dppo_megatron.rollout.engines.protocol import GenerateRequest
from dppo_megatron.rollout.engines.samples import GroupSamples
from dppo_megatron.rollout.engines.trace import Trace
from dppo_megatron.types import COLUMNS, SAFETENSORS_DTYPES

MEDIA_TYPE = "application/x-safetensors"


def encode_reply(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> bytes:
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    return save(contiguous, metadata={"header": json.dumps(header)})


def decode_reply(reply: bytes | bytearray) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the header and the arrays, which are views of `reply`. Raises ValueError unless `encode_reply` made it."""
    try:
        size = int.from_bytes(reply[:8], "little")
        if 8 + size > len(reply):
            raise ValueError(f"invalid header length {size}")
        table = json.loads(reply[8 : 8 + size])
        header = dict(json.loads(table.pop("__metadata__")["header"]))
        return header, _views(memoryview(reply)[8 + size :], table)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not safetensors with a header ({error!r}); it begins with {bytes(reply[:16])!r}") from error


def encode_samples(header: dict[str, Any], samples: GroupSamples) -> bytes:
    """Encode the samples of a group with all their columns."""
    arrays = {"lengths": samples.lengths, "token_ids": samples.token_ids, **samples.columns}
    return encode_reply({**header, "finish_reasons": samples.finish_reasons, "counts": samples.counts}, arrays)


def decode_samples(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> GroupSamples:
    """Decode the result of `decode_reply` for `encode_samples`; ignore columns that `COLUMNS` does not list.

    Raises KeyError, TypeError and ValueError for anything else.
    """
    columns = {column.name: arrays[column.name] for column in COLUMNS if column.name in arrays}
    counts = {str(name): int(count) for name, count in dict(header.get("counts", ())).items()}
    return GroupSamples(arrays["lengths"], tuple(header["finish_reasons"]), arrays["token_ids"], columns, counts)


def _views(data: memoryview, table: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the arrays as views of `data`, where they are end to end without gaps.

    The safetensors reader would copy every array.
    """
    arrays, end = {}, 0
    for name, entry in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape, (start, stop) = SAFETENSORS_DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
            raise ValueError(f"{name}: {entry}")
        if start != end or stop - start != math.prod(shape) * dtype.itemsize or stop > len(data):
            raise ValueError(f"not fully covered: {name} is bytes {start} to {stop} of {len(data)}, {shape} of {dtype}")
        arrays[name], end = np.frombuffer(data[start:stop], dtype).reshape(shape), stop
    if end != len(data):
        raise ValueError(f"not fully covered: the last {len(data) - end} bytes belong to no array")
    return arrays


def encode_request(request: GenerateRequest) -> bytes:
    values = {f.name: getattr(request, f.name) for f in fields(request) if f.name != "affinity"}
    for name in ("flags", "drafts", "scored"):  # earlier servers do not know these fields
        if not values[name]:
            del values[name]
    arrays = {"token_ids": request.token_ids.tolist()}
    if request.drafts:
        arrays["drafts"] = [tokens.tolist() for tokens in request.drafts]
    return json.dumps(values | arrays).encode()


def encode_trace(logprobs: np.ndarray, workers: list[list[tuple[int, str, bytes, str, tuple[int, ...]]]]) -> bytes:
    """Encode the values that every worker recorded (`WorkerExtension.dppo_take_trace`) and the pass's log-probs."""
    arrays, dtypes = {"logprobs": logprobs}, {}
    for worker, values in enumerate(workers):
        for layer, operator, bits, dtype, shape in values:
            name = f"{worker}/{layer}/{operator}"
            arrays[name] = np.frombuffer(bits, dtype=f"int{8 * getattr(torch, dtype).itemsize}").reshape(shape)
            dtypes[name] = dtype
    return encode_reply({"dtypes": dtypes, "workers": len(workers)}, arrays)


def decode_trace(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> list[Trace]:
    """Return the traces of all workers.

    Raises KeyError, TypeError, ValueError, AttributeError or RuntimeError for any other reply.
    """
    traces: list[Trace] = [{} for _ in range(header["workers"])]
    for name, dtype in header["dtypes"].items():
        worker, layer, operator = name.split("/")
        bits = torch.from_numpy(arrays[name].copy())
        traces[int(worker)][int(layer), operator] = bits.view(getattr(torch, dtype))
    return traces


def bits_of(value: torch.Tensor) -> np.ndarray:
    """Return the bits of `value` as an array, because numpy has no bfloat16."""
    return value.contiguous().view(getattr(torch, f"int{8 * value.dtype.itemsize}")).numpy()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
