"""Moves memory to the host: the actor's while engines use the same GPU, or the optimizer's between steps.

Storages are emptied and refilled in place, so every tensor, view and hook of Megatron's buffers stays the same object.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn

SMALLEST_PIECE = 1 << 20


@contextmanager
def offloaded(chunks: Sequence[nn.Module], optimizer: MegatronOptimizer, device: torch.device) -> Iterator[int]:
    """Free the memory that `chunks` and `optimizer` use on `device` within the context; yield the bytes freed.

    Neither may be used within the context. `chunks` belong to the trained model and to frozen models. Afterwards
    parameters and optimizer state have the same bits as before; gradients are 0, as at the start of every update. No
    collectives. The host needs as much free memory (pinned, with CUDA).
    """
    contents = _Storages(_on(device, _contents(chunks, optimizer)))
    gradients = _Storages(_on(device, _gradients(chunks)), keep=False, but=contents)
    freed = contents.empty() + gradients.empty()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    try:
        yield freed
    finally:
        gradients.refill()
        contents.refill()
        if device.type == "cuda":
            torch.cuda.synchronize()


class OptimizerOnHost:
    """Keeps main parameters and Adam's state on the host except inside `on_device`: `optimizer.offload`.

    Between steps activations can use the device memory. All values keep their bits. Storages shared with the model's
    parameters stay on the device (an fp32 model has no separate main parameters). The host needs as much memory
    (pinned, with CUDA).
    """

    def __init__(self, optimizer: MegatronOptimizer, chunks: Sequence[nn.Module], device: torch.device):
        self._optimizer, self._chunks, self._device = optimizer, chunks, device
        self._offloaded: _Storages | None = None

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Move the state to the device within the context. No collectives. After an error the state stays there."""
        if self._offloaded is not None:
            self._offloaded.refill()
            self._offloaded = None
        yield
        model = _Storages(parameter for chunk in self._chunks for parameter in chunk.parameters())
        storages = _Storages(_on(self._device, _optimizer_contents(self._optimizer)), but=model)
        storages.empty()
        self._offloaded = storages


def _contents(chunks: Sequence[nn.Module], optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    for chunk in chunks:
        yield from chunk.parameters()
        yield from chunk.buffers()
    yield from _optimizer_contents(optimizer)


def _optimizer_contents(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    for part in optimizer.chained_optimizers:
        if part.optimizer is None:  # this rank has no parameters of this kind
            continue
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _gradients(chunks: Sequence[nn.Module]) -> Iterator[Tensor]:
    for chunk in chunks:
        parameters: Iterator[Any] = chunk.parameters()  # Megatron adds the attribute
        yield from (parameter.main_grad for parameter in parameters if parameter.requires_grad)


def _on(device: torch.device, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    return (tensor for tensor in tensors if tensor.device.type == device.type)


class _Storages:
    """Collects the distinct storages behind some tensors, as a whole even if they contain other tensors too."""

    def __init__(self, tensors: Iterable[Tensor], *, keep: bool = True, but: _Storages | None = None):
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        excluded_keys = but._sizes if but else {}
        self._storages = {
            key: storage for key, storage in storages.items() if key not in excluded_keys and storage.nbytes()
        }
        self._keep = keep
        self._host: dict[int, list[Tensor]] = {}
        self._sizes: dict[int, int] = {key: storage.nbytes() for key, storage in self._storages.items()}

    def empty(self) -> int:
        """Copy the contents to the host if they are kept, free the storages, and return the bytes freed."""
        for key, storage in self._storages.items():
            if self._keep:
                cuda = storage.device.type == "cuda"
                sizes = host_pieces(storage.nbytes())
                self._host[key] = [torch.empty(n, dtype=torch.uint8, device="cpu", pin_memory=cuda) for n in sizes]
                for host, piece in zip(self._host[key], _bytes(storage).split(sizes), strict=True):
                    host.copy_(piece, non_blocking=True)
        for storage in self._storages.values():
            if storage.device.type == "cuda":
                torch.cuda.current_stream().synchronize()  # the copies must be complete before the memory is freed
            storage.resize_(0)
        return sum(self._sizes.values())

    def refill(self) -> None:
        for key, storage in self._storages.items():
            storage.resize_(self._sizes[key])
            if self._keep:
                pieces = self._host.pop(key)
                for host, piece in zip(pieces, _bytes(storage).split([len(h) for h in pieces]), strict=True):
                    piece.copy_(host, non_blocking=True)
            else:
                _bytes(storage).zero_()


def host_pieces(nbytes: int) -> list[int]:
    """Return sizes that add up to `nbytes`: powers of two, except a last size below `SMALLEST_PIECE`.

    torch rounds every pinned allocation up to a power of two, so a single piece could take twice the memory. 3.5 MiB
    give pieces of 2, 1 and 0.5 MiB.
    """
    sizes = []
    while nbytes >= SMALLEST_PIECE:
        sizes.append(1 << (nbytes.bit_length() - 1))
        nbytes -= sizes[-1]
    return [*sizes, nbytes] if nbytes else sizes


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
