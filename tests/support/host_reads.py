"""Rejects operations on CPU tensors that would make the host wait for a GPU."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Functions by Python name, because some read CPU memory without an operator.
_READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "equal"}
# Operators that read values, or have result shapes that depend on values.
_OPERATORS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_consecutive",
    "unique_dim",
    "equal",
    "repeat_interleave",
}


class HostRead(AssertionError):
    """Raised if a value or shape is read from a tensor that a GPU would still be computing."""


def _masks(index: Any) -> bool:
    parts = index if isinstance(index, tuple | list) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in parts)


class _Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in _READS or (name in ("__getitem__", "__setitem__") and _masks(args[1])):
            raise HostRead(name)
        return function(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in _OPERATORS:
            raise HostRead(str(function))
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_host_reads() -> Iterator[None]:
    """Make every operation that would synchronize with a device raise HostRead."""
    with _Functions(), _Operators():
        yield
