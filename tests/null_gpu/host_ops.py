"""Computes torch's operators for the null device: its memory is the host's, so their CPU kernels can work on it.

Inside `HostOperators` each operator on CUDA tensors runs twice. First its CUDA implementation, whose kernels write
nothing: it checks devices and dtypes, allocates results, reports waits. Then the kernel of the CPU, which computes the
values into the same memory. An operator whose result has a size that depends on values runs on the CPU only, and counts
as a wait, as it is one on a GPU. Collectives run over gloo. Not computed: kernels of Triton and of other extensions,
whose outputs are zeros.
"""

import contextlib
import ctypes
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

import tests.support.flash

aten = torch.ops.aten

# Their sizes follow from values: the host reads those first.
WAITING = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
}
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
# Memory as it was allocated: zeros, so that a run is the same each time.
EMPTY = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default,
         aten.new_empty_strided.default}  # fmt: skip
# They move no values, or move them with a copy, which works.
WITHOUT_VALUES = {
    aten._local_scalar_dense.default,
    aten.resize_.default,
    aten.record_stream.default,
    *(getattr(aten.set_, name) for name in aten.set_.overloads()),
}
# Kernels of attention that the CPU does not have; where they are allowed, their results are zeros.
UNCOMPUTED = ("dot_product_flash_attention", "dot_product_efficient_attention")
# Operators that show which kernel attends: those, FlashAttention of packed sequences, and parts of torch's math kernel.
ATTENDING = (*UNCOMPUTED, *tests.support.flash.OPERATORS, "_safe_softmax", "aten::_softmax")
HOST_ONLY = ("pin_memory", "non_blocking", "generator")


class HostOperators(TorchDispatchMode):
    """While active in a thread (and in the backward passes that it starts), CUDA operators have values."""

    def __init__(self) -> None:
        super().__init__()
        self.attending: Counter[str] = Counter()  # of `ATTENDING`
        self.grouped = 0  # calls of the grouped matrix product
        self._random = torch.Generator().get_state()

    @contextlib.contextmanager
    def _randomness(self, func: Any) -> Iterator[None]:
        """Numbers that the device draws leave the CPU's generator as it is."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            yield
            return
        kept = torch.default_generator.get_state()
        torch.default_generator.set_state(self._random)
        try:
            yield
        finally:
            self._random = torch.default_generator.get_state()
            torch.default_generator.set_state(kept)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _on_device(args, kwargs):
            return func(*args, **kwargs)
        if func.namespace == "c10d":  # gloo, on the same memory
            return _back(func(*_host(args), **_host(kwargs)), args)
        if func.namespace not in ("aten", "prims"):
            return func(*args, **kwargs)
        if func in WAITING:
            _wait()
            return tree_map(_to_device(_device(args)), func(*_host(args), **_host_options(kwargs)))
        if func in INDEXING:
            args = (args[0], _without_masks(args[1]), *args[2:])
        out = func(*args, **kwargs)
        if func in EMPTY:
            _view(out).zero_() if out.is_cuda else None
            return out
        if func in WITHOUT_VALUES or _is_view(func) or _is_plain_copy(func, args, out):
            return out
        self.grouped += func is aten._grouped_mm.default
        if any(name in func.name() for name in ATTENDING):
            self.attending[func.name()] += 1
        if any(name in func.name() for name in UNCOMPUTED):
            tree_map(lambda leaf: _host(leaf).zero_() if isinstance(leaf, Tensor) else leaf, out)
            return out
        with self._randomness(func):
            wanted = _cpu_kernel(func)(*_host(args), **_host_options(kwargs))
        return _filled(out, wanted)


def _cpu_kernel(func: Any) -> Any:
    """Return the operator, or torch's decomposition of it if the CPU has no kernel."""
    if torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), "CPU"):
        return func
    return decomposition_table[func]


def _filled(out: Any, wanted: Any) -> Any:
    """Return `out` with the values of `wanted`; values that are no tensors come from `wanted`."""
    outs, spec = tree_flatten(out)
    values = []
    for here, there in zip(outs, tree_flatten(wanted)[0], strict=True):
        if isinstance(here, Tensor):
            own = _host(here)
            if own.data_ptr() != there.data_ptr() and own.numel():
                own.copy_(there)
            values.append(here)
        else:
            values.append(there)
    return torch.utils._pytree.tree_unflatten(values, spec)


def _back(out: Any, given: Any) -> Any:
    """`out` with the device's tensors in the place of their views."""
    tensors = {leaf.data_ptr(): leaf for leaf in tree_flatten(given)[0] if isinstance(leaf, Tensor)}
    return tree_map(lambda leaf: tensors.get(leaf.data_ptr(), leaf) if isinstance(leaf, Tensor) else leaf, out)


def _on_device(*trees: Any) -> bool:
    return any(
        (isinstance(leaf, Tensor) and leaf.is_cuda) or (isinstance(leaf, torch.device) and leaf.type == "cuda")
        for leaf in tree_flatten(trees)[0]
    )


def _device(tree: Any) -> torch.device:
    return next(leaf.device for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor) and leaf.is_cuda)


def _to_device(device: torch.device) -> Any:
    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        out = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        if out.numel():
            _view(out).copy_(value)
        return out

    return moved


def _host(tree: Any) -> Any:
    return tree_map(lambda leaf: _view(leaf) if isinstance(leaf, Tensor) and leaf.is_cuda else leaf, tree)


def _host_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in kwargs.items() if name not in HOST_ONLY}
    if kept.get("device") is not None:
        kept["device"] = torch.device("cpu")
    return _host(kept)


def _view(tensor: Tensor) -> Tensor:
    """The same memory as a tensor of the CPU."""
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if size == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = torch.frombuffer((ctypes.c_char * size).from_address(storage.data_ptr()), dtype=torch.uint8)
    whole = memory[: size // tensor.element_size() * tensor.element_size()].view(tensor.dtype)
    view = torch.as_strided(whole, tensor.shape, tensor.stride(), tensor.storage_offset())
    if tensor.is_conj():
        view = view.conj()
    return torch._neg_view(view) if tensor.is_neg() else view


def _is_view(func: Any) -> bool:
    """Its result is memory of an argument, which it does not write."""
    infos = [r.alias_info for r in func._schema.returns]
    return any(i is not None and not i.is_write for i in infos) and not func._schema.is_mutable


def _is_plain_copy(func: Any, args: Any, out: Any) -> bool:
    """Between host and device, of whole memory as it is: no kernel is needed, and the host may not have it yet."""
    if func is aten.copy_.default:
        source, into = args[1], args[0]
    elif func is aten._to_copy.default:
        source, into = args[0], out
    else:
        return False
    same = source.dtype == into.dtype and source.shape == into.shape and source.device.type != into.device.type
    return same and source.is_contiguous() and into.is_contiguous() and not source.is_neg() and not source.is_conj()


def _wait() -> None:
    """Imitate torch in an operator that makes the host wait."""
    torch.cuda.current_stream().synchronize()  # torch reports this one too
    if torch.cuda.get_sync_debug_mode() == 2:
        raise RuntimeError("called a synchronizing CUDA operation")


def _without_masks(indices: list[Tensor | None]) -> list[Tensor | None]:
    """Masks as the rows that they select, for which the host waits."""
    out: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            out.append(index)
            continue
        if index.is_cuda:
            _wait()
        rows = _host(index).nonzero(as_tuple=True)
        out += map(_to_device(index.device), rows) if index.is_cuda else rows
    return out
