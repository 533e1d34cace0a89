"""Runs Megatron-core on a machine without CUDA: the one module that patches anything for this purpose.

Megatron-core's source names CUDA: literal devices, `.cuda()`, streams, the CUDA generator. `install` makes these names
mean the CPU; call it before the first class of Megatron-core is built. Layer specs replace norms and core attention.
"""

from __future__ import annotations

import contextlib
import functools

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def install() -> None:
    """Make Megatron-core's CUDA names mean the CPU, process-wide. Idempotent; a no-op where CUDA is available."""
    if torch.cuda.is_available() or torch.cuda.current_device is _current_device:
        return
    _patch_devices()
    _patch_generators()
    _patch_streams()
    _patch_experts()
    _patch_uneven_exchange()
    _patch_exchange_with_oneself()


def _patch_devices() -> None:
    """Use the CPU where mappings, buffers and schedules allocate on `torch.cuda.current_device()` or "cuda"."""
    torch.cuda.current_device = _current_device
    torch.cuda.synchronize = _nothing
    _CudaMeansCpu().__enter__()


def _patch_generators() -> None:
    """Use the CPU's generator where recompute and the RNG tracker save and restore the CUDA generator."""
    from megatron.core.tensor_parallel import random

    torch.cuda.get_rng_state = _get_rng_state
    torch.cuda.random.get_rng_state = _get_rng_state
    torch.cuda.set_rng_state = _set_rng_state
    torch.cuda.manual_seed = torch.default_generator.manual_seed
    random._get_cuda_rng_state = _get_rng_state
    random._set_cuda_rng_state = _set_rng_state


def _patch_streams() -> None:
    """Make the streams and events of pipeline exchange, all-to-all dispatcher and checkpoints do nothing."""
    torch.cuda.Stream = _Stream
    torch.cuda.Event = _Stream
    torch.cuda.current_stream = functools.partial(_Stream)
    torch.cuda.stream = contextlib.nullcontext


def _patch_experts() -> None:
    """Patch two places in the mixture-of-experts code that work only on a GPU with TransformerEngine."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # It converts only GPU tensors to numpy, but its callers index numpy arrays.
    token_dispatcher.maybe_move_tensor_to_cpu = _to_host
    if not hasattr(moe_utils, "te_general_gemm"):  # read, but not imported without TransformerEngine
        moe_utils.te_general_gemm = None


def _patch_uneven_exchange() -> None:
    """Gather the tokens of sharded experts unevenly, which NCCL can do and gloo rejects."""
    from megatron.core.tensor_parallel import mappings

    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim
    mappings._gather_along_first_dim = functools.partial(_gather_unevenly, gather)
    mappings._reduce_scatter_along_first_dim = functools.partial(_reduce_scatter_unevenly, reduce_scatter)


def _patch_exchange_with_oneself() -> None:
    """Skip the exchange of a single replica: NCCL then does nothing, but gloo copies gradients and parameters."""
    from megatron.core.distributed import param_and_grad_buffer as buffers

    buffers.dist_all_gather_func = functools.partial(_unless_in_place, buffers.dist_all_gather_func)
    buffers.dist_reduce_scatter_func = functools.partial(_unless_in_place, buffers.dist_reduce_scatter_func)


class _CudaMeansCpu(TorchFunctionMode):
    """Maps device="cuda", `.cuda()` and pinned memory to the CPU, and the type strings that the optimizer compares."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
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

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def record_event(self, event=None):
        return event or _Stream()

    def synchronize(self):
        pass

    def record(self, stream=None):
        pass

    def wait(self, stream=None):
        pass

    def query(self):
        return True


def _current_device() -> torch.device:
    return _CPU


def _nothing(*args, **kwargs) -> None:
    pass


def _get_rng_state(device="cuda", clone=False, graph_safe=False) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state, device=-1, graph_safe=False) -> None:
    torch.set_rng_state(new_state)


def _gather_unevenly(evenly, input_, group, output_split_sizes=None, use_global_buffer=False):
    if output_split_sizes is None or group.size() == 1:
        return evenly(input_, group, None, use_global_buffer)
    out = input_.new_empty(sum(output_split_sizes), *input_.shape[1:])
    mine = [input_.shape[0]] * group.size()
    everywhere = input_.repeat(group.size(), *[1] * (input_.dim() - 1))
    dist.all_to_all_single(out, everywhere, list(output_split_sizes), mine, group=group)
    return out


def _reduce_scatter_unevenly(evenly, input_, group, input_split_sizes=None, use_global_buffer=False):
    if input_split_sizes is None or group.size() == 1:
        return evenly(input_, group, None, use_global_buffer)
    total = input_.clone()
    dist.all_reduce(total, group=group)
    return total.split(list(input_split_sizes))[group.rank()].clone()


def _unless_in_place(exchange, out, input_, **settings):
    if settings["group"].size() == 1 and out.data_ptr() == input_.data_ptr():
        return None
    return exchange(out, input_, **settings)


def _to_host(tensor, as_numpy=False, record_stream=False):
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
