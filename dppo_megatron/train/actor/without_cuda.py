"""Runs Megatron-core on a machine without CUDA. All patches for this purpose are in this module.

Megatron-core's source names CUDA in literal devices, `.cuda()`, streams and the CUDA generator. `install` maps these
names to the CPU. Call it before building any Megatron-core class. Layer specs replace norms and core attention.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
NORM_PART = 1 << 14  # values
_cuda: Any = torch.cuda  # replacements need not have the types of the originals


def install() -> None:
    """Make Megatron-core's CUDA names mean the CPU, process-wide. Idempotent; a no-op where CUDA is available."""
    if torch.cuda.is_available() or torch.cuda.current_device is _current_device:
        return
    _patch_devices()
    _patch_generators()
    _patch_streams()
    _patch_norm()
    _patch_experts()
    _patch_uneven_exchange()
    _patch_exchange_with_oneself()


def _patch_devices() -> None:
    """Use the CPU where mappings, buffers and schedules allocate on `torch.cuda.current_device()` or "cuda"."""
    _cuda.current_device = _current_device
    _cuda.synchronize = _nothing
    _CudaMeansCpu().__enter__()


def _patch_generators() -> None:
    """Use the CPU's generator where recompute and the RNG tracker save and restore the CUDA generator."""
    from megatron.core.tensor_parallel import random

    _cuda.get_rng_state = _get_rng_state
    _cuda.random.get_rng_state = _get_rng_state
    _cuda.set_rng_state = _set_rng_state
    _cuda.manual_seed = torch.default_generator.manual_seed
    random._get_cuda_rng_state = _get_rng_state
    random._set_cuda_rng_state = _set_rng_state


def _patch_streams() -> None:
    """Make the streams and events of pipeline exchange, all-to-all dispatcher and checkpoints do nothing."""
    _cuda.Stream = _Stream
    _cuda.Event = _Stream
    _cuda.current_stream = functools.partial(_Stream)
    _cuda.stream = contextlib.nullcontext


def _patch_norm() -> None:
    """Sum squared gradients by parts. In fp32 torch's norm of 28 M values on a CPU is .16 % too low.

    Other layouts have smaller tensors, and would clip differently.
    """
    from megatron.core.optimizer import clip_grads

    clip_grads.l2_norm_impl = _l2_norm


def _patch_experts() -> None:
    """Patch two places in the mixture-of-experts code that work only on a GPU with TransformerEngine."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # The original converts only GPU tensors to numpy, but its callers index numpy arrays.
    token_dispatcher.maybe_move_tensor_to_cpu = _to_host
    if not hasattr(moe_utils, "te_general_gemm"):  # Megatron reads it, but imports it only with TransformerEngine
        moe_utils.te_general_gemm = None


def _patch_uneven_exchange() -> None:
    """Gather tokens for sharded experts unevenly; NCCL can do this, but gloo rejects it."""
    from megatron.core.tensor_parallel import mappings

    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim
    mappings._gather_along_first_dim = functools.partial(_gather_unevenly, gather)
    mappings._reduce_scatter_along_first_dim = functools.partial(_reduce_scatter_unevenly, reduce_scatter)


def _patch_exchange_with_oneself() -> None:
    """Skip a single replica's exchange, because gloo, unlike NCCL, copies gradients and parameters for it."""
    from megatron.core.distributed import param_and_grad_buffer as buffers

    buffers.dist_all_gather_func = functools.partial(_unless_in_place, buffers.dist_all_gather_func)
    buffers.dist_reduce_scatter_func = functools.partial(_unless_in_place, buffers.dist_reduce_scatter_func)


class _CudaMeansCpu(TorchFunctionMode):
    """Maps device="cuda", `.cuda()` and pinned memory to the CPU, and the type strings that the optimizer compares."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if kwargs:
            device = kwargs.get("device")
            if device is not None and torch.device(device).type == "cuda":
                kwargs = {**kwargs, "device": _CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
            return func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args)


class _Stream:
    """Replaces a stream or an event on a device that runs everything in order."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def _nothing(self, stream_or_event: Any = None) -> None:
        pass

    wait_stream = wait_event = synchronize = record = wait = _nothing

    def record_event(self, event: _Stream | None = None) -> _Stream:
        return event or _Stream()

    def query(self) -> bool:
        return True


def _current_device() -> torch.device:
    return _CPU


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _get_rng_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _l2_norm(_chunk: int, _flag: Tensor, tensors: Sequence[Sequence[Tensor]], _per_tensor: bool) -> tuple[Tensor, None]:
    parts = (part for tensor in tensors[0] for part in tensor.flatten().split(NORM_PART))
    return torch.tensor([math.hypot(*(float(part.norm()) for part in parts))]), None


def _gather_unevenly(
    evenly: Callable[..., Tensor],
    input_: Tensor,
    group: dist.ProcessGroup,
    output_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    if output_split_sizes is None or group.size() == 1:
        return evenly(input_, group, None, use_global_buffer)
    out = input_.new_empty(sum(output_split_sizes), *input_.shape[1:])
    input_split_sizes = [input_.shape[0]] * group.size()
    copies = input_.repeat(group.size(), *[1] * (input_.dim() - 1))
    dist.all_to_all_single(out, copies, list(output_split_sizes), input_split_sizes, group=group)
    return out


def _reduce_scatter_unevenly(
    evenly: Callable[..., Tensor],
    input_: Tensor,
    group: dist.ProcessGroup,
    input_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    if input_split_sizes is None or group.size() == 1:
        return evenly(input_, group, None, use_global_buffer)
    total = input_.clone()
    dist.all_reduce(total, group=group)
    return total.split(list(input_split_sizes))[group.rank()].clone()


def _unless_in_place(exchange: Callable[..., Any], out: Tensor, input_: Tensor, **settings: Any) -> Any:
    if settings["group"].size() == 1 and out.data_ptr() == input_.data_ptr():
        return None
    return exchange(out, input_, **settings)


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
