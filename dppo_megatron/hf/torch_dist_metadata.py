"""Reads `.metadata` from a torch_dist checkpoint. The file is a pickle, but only tensor descriptions are accepted.

torch reads the file with `pickle.load`, which runs any code that the pickle names.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import pickle
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from .errors import ModelError

METADATA = ".metadata"

_CLASSES = {
    metadata: (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    filesystem: ("_StorageInfo", "_StoragePrefix"),
    # Megatron-LM checkpoints name these classes.
    planner: ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"),
}  # fmt: skip
_ADMITTED: dict[tuple[str, str], Any] = {
    (module.__name__, name): getattr(module, name) for module, names in _CLASSES.items() for name in names
}
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"  # module with these classes up to release 0.15
_ADMITTED |= {(_MEGATRON, "MCoreMetadata"): Metadata, (_MEGATRON, "MCoreSavePlan"): planner.SavePlan}
_ADMITTED |= {("torch", "Size"): torch.Size, ("torch.serialization", "_get_layout"): torch.serialization._get_layout}
_ADMITTED |= {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
# Pickles contain the file's path at writing time. It is not read, so any path type is accepted.
_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
_ADMITTED |= {(module, name): PurePath for module in ("pathlib", "pathlib._local") for name in _PATHS}
# A pickle may set fields only on objects that it created. Changed fields on a class, function or enumeration member
# would persist, and equal bytes could mean something else when torch reads them again.
_FILLED = {kind for kind in _ADMITTED.values() if isinstance(kind, type) and not issubclass(kind, (Enum, PurePath))}


def _fill(unpickler: Any) -> None:
    target = unpickler.stack[-2]
    if type(target) not in _FILLED:
        raise pickle.UnpicklingError(f"sets fields of {target!r:.100}, which it did not create; not loaded")
    pickle._Unpickler.dispatch[pickle.BUILD[0]](unpickler)


class _Unpickler(pickle._Unpickler):  # the C unpickler has no hook before it sets fields
    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: _fill}

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"names {module}.{name}, which describes no tensor; not loaded") from None


class _Quick(pickle.Unpickler):
    find_class = _Unpickler.find_class


def read_metadata(directory: Path) -> Metadata:
    """Read the tensor descriptions in `directory`.

    Raises `ModelError`, naming the file, if it cannot be read, contains anything else, or places tensors outside
    `directory`.
    """
    return read_checked(directory)[0]


def read_checked(directory: Path) -> tuple[Metadata, str]:
    """Return the metadata as `read_metadata` does, and the file's digest for `read_again`."""
    digest = ""
    try:
        content = (directory / METADATA).read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        metadata = _Unpickler(io.BytesIO(content)).load()
        problem = _problem(metadata)
    except Exception as error:  # bytes that are not a pickle raise many types of errors
        problem = f"cannot be read: {error!r}"[:500]
    if problem:
        raise ModelError(str(directory), [f"{METADATA}: {problem}"])
    return metadata, digest


def read_again(directory: Path, digest: str) -> Metadata:
    """Read the file again with the C unpickler. Raises `ModelError` if the bytes changed since the check."""
    content = (directory / METADATA).read_bytes()
    if not hmac.compare_digest(hashlib.sha256(content).hexdigest(), digest):
        raise ModelError(str(directory), [f"{METADATA}: was changed after it was checked; not loaded"])
    return _Quick(io.BytesIO(content)).load()


def _problem(metadata: Any) -> str | None:
    """Return the first reason why `metadata` is not valid checkpoint metadata, or None if it is valid."""
    if type(metadata) is not Metadata:
        return f"holds a {type(metadata).__name__}, not a checkpoint's metadata"
    for key, stored in metadata.state_dict_metadata.items():
        if type(key) is not str or type(stored) not in (TensorStorageMetadata, BytesStorageMetadata):
            return f"{str(key)[:100]!r}: neither a tensor nor bytes"
        if type(stored) is TensorStorageMetadata and not _is_tensor(stored):
            return f"{key!r}: not the description of a tensor"
    for index, stored in metadata.storage_data.items():
        if type(index) is not MetadataIndex or type(stored) is not filesystem._StorageInfo:
            return "its storage is not that of a file system"
        name, numbers = stored.relative_path, (stored.offset, stored.length)
        is_file = type(name) is str and PurePath(name).name == name and name not in ("", "..")
        if not is_file or any(type(number) is not int or number < 0 for number in numbers):
            return f"{index.fqn!r}: stored at {name!r}, which is no file of the checkpoint"
    return None


def _is_tensor(stored: TensorStorageMetadata) -> bool:
    return (
        isinstance(stored.properties.dtype, torch.dtype)
        and _are_sizes(stored.size)
        and all(
            type(chunk) is ChunkStorageMetadata and _are_sizes(chunk.offsets) and _are_sizes(chunk.sizes)
            for chunk in stored.chunks
        )
    )


def _are_sizes(sizes: Any) -> bool:
    return isinstance(sizes, tuple) and all(type(size) is int and size >= 0 for size in sizes)
