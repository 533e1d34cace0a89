"""Reads checkpoint files only as data: a pickle that names code is rejected before any code runs.

Megatron and torch read `.metadata`, objects among the shards and TransformerEngine's states with plain pickle.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from dppo_megatron.common.environment import environment
from dppo_megatron.common.files import read_json
from dppo_megatron.hf import ModelError
from dppo_megatron.hf.torch_dist_metadata import read_again, read_checked
from dppo_megatron.hf.torch_dist_place import MARKER, is_torch_dist

from .directory import CheckpointError

COMMON = "common.pt"
RECIPES = "transformer_engine.common.recipe"  # the only names in TransformerEngine's state besides numbers
_STATE = np.zeros(1, np.uint32)  # an array like the state of numpy's generator
_RECONSTRUCT = _STATE.__reduce__()[0]  # the function that numpy's array pickles name
_GENERATORS: list[Any] = [
    *((_RECONSTRUCT, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *(np.ndarray, np.dtype, type(_STATE.dtype)),
]
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")  # the name that torch and `_DryUnpickler` reject


def check_files(path: Path) -> str:
    """Raise CheckpointError with the file name if a file contains more than tensors and numbers.

    Returns the digest of `.metadata`, for `checked_metadata`.
    """
    marker = read_json(path / MARKER) or {}
    if not is_torch_dist(path) or marker.get("common_backend", "torch") != "torch":
        raise CheckpointError(f"{path / MARKER}: does not name the format torch_dist; resume from another checkpoint")
    try:
        _, digest = read_checked(path)
    except ModelError as error:
        raise CheckpointError("; ".join(f"{path}/{problem}" for problem in error.problems)) from None
    if (path / COMMON).exists():  # Megatron-core 0.19 stores these contents among the shards
        load_data(path / COMMON)
    return digest


@contextmanager
def checked_metadata(digest: str) -> Iterator[None]:
    """Make torch parse only the checked bytes of `.metadata` in the context; reject a file that has changed."""
    read_metadata = FileSystemReader.read_metadata

    def read(self: FileSystemReader, *_: Any, **__: Any) -> Metadata:
        metadata = read_again(Path(self.path), digest)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    FileSystemReader.read_metadata = read  # type: ignore[method-assign]
    try:
        yield
    finally:
        FileSystemReader.read_metadata = read_metadata  # type: ignore[method-assign]


def load_data(path: Path) -> Any:
    """Load tensors, arrays, numbers and text that torch.save wrote. Raises CheckpointError for anything else."""
    try:
        with torch.serialization.safe_globals(_GENERATORS):
            return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        raise CheckpointError(f"{path}: cannot be read: {reason(error)}") from None


def data_only() -> AbstractContextManager[None]:
    """Make every torch.load within the context accept only data, even if the caller asks for more."""
    return environment(TORCH_FORCE_WEIGHTS_ONLY_LOAD="1", TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="0")


def reason(error: BaseException) -> str:
    """Describe an error in one line, without torch's advice to read the file unsafely."""
    if match := _GLOBAL.search(str(error)):
        return f"it contains the object {match[1]}; only tensors and plain values are loaded"
    text = str(error).partition("WeightsUnpickler error:")[2] or str(error)
    return f"{type(error).__name__}: {(text.strip().splitlines() or [''])[0][:500]}"


def check_extra_states(loaded: dict[str, Any], path: Path) -> None:
    """Raise CheckpointError if an `_extra_state` contains objects other than TransformerEngine's recipes.

    TransformerEngine unpickles this state, which could run code.
    """
    for name, value in _flat(loaded):
        if not name.rpartition(".")[2].startswith("_extra_state"):
            continue
        try:
            if isinstance(value, Tensor) and value.numel():
                _DryUnpickler(io.BytesIO(value.detach().cpu().numpy().tobytes())).load()
            elif isinstance(value, io.BytesIO) and value.getbuffer().nbytes:
                torch.load(io.BytesIO(value.getvalue()), weights_only=True)
        except Exception as error:
            raise CheckpointError(f"{path}: {name[1:]} cannot be read: {reason(error)}") from None


class _Inert:
    """Replaces an object of another package; can be created and filled, but does nothing."""

    def __init__(self, *_arguments: object, **_settings: object):
        pass

    def __setstate__(self, _state: object) -> None:
        pass


class _DryUnpickler(pickle.Unpickler):
    """Checks the names that `pickle.loads` would look up, without creating the objects."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module != RECIPES or not name.isidentifier() or not name.lstrip("_")[:1].isupper():
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")
        return _Inert


def _member(kind: type, name: str) -> _Inert:
    """Return a member of an enumeration, which Python 3.11.2 pickles by name."""
    if kind is not _Inert or name.startswith("_"):
        raise pickle.UnpicklingError(f"GLOBAL builtins.getattr of {name}")
    return _Inert()


def _flat(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _flat(value, f"{name}.{key}")
    else:
        yield name, tree
