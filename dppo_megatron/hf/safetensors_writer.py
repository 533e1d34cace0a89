"""Writes a complete Hugging Face directory: parts in a staging directory, index, config, tokenizer, a rename.

Several processes may write parts into the same staging directory. Then one process assembles and renames it.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dppo_megatron.common.files import replace_directory, sync_tree, write_atomic

from .errors import ModelError
from .hf_config import MTP_NAMES
from .safetensors_file import SafetensorsFile, info_of
from .safetensors_reader import INDEX_FILE, SINGLE_FILE

DEFAULT_SHARD_BYTES = 4 << 30
LOOK_S = 0.5  # time between two checks while a file is written
DISK_TIMEOUT_S = 600.0  # longest time without a flush
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


@dataclass(frozen=True, slots=True)
class Part:
    """Describes a finished file in the staging directory."""

    file: str
    names: tuple[str, ...]
    nbytes: int


class PartWriter:
    """Writes tensors in order into files of at most `shard_bytes`, but with at least one tensor. A context manager.

    A thread writes one file while the next one fills, so peak memory is twice `shard_bytes` plus one tensor. CPU
    tensors are not copied, so they must not change before `close`. `tag` distinguishes the files of several writers.
    `alive` is called while the writer waits for a disk that accepts bytes. If the disk accepts no bytes for `timeout_s`
    seconds, `OSError` is raised. Without `durable`, files may be only in system memory when the writer is done.
    """

    def __init__(
        self,
        staging: Path,
        tag: str,
        shard_bytes: int = DEFAULT_SHARD_BYTES,
        alive: Callable[[], None] = lambda: None,
        timeout_s: float = DISK_TIMEOUT_S,
        *,
        durable: bool = True,
    ):
        self._staging, self._tag, self._shard_bytes, self._alive = staging, tag, shard_bytes, alive
        self._timeout_s, self._dead = timeout_s, False
        self._durable = durable
        self._open: dict[str, Tensor] = {}
        self._open_bytes = 0
        self._parts: list[Part] = []
        self._moved = threading.Event()
        self._thread = ThreadPoolExecutor(1, "weights")
        self._writing: Future[None] | None = None

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, *_error: object) -> None:
        self._thread.shutdown(wait=not self._dead)

    def add(self, name: str, tensor: Tensor) -> None:
        if name in self._open:
            raise ValueError(f"{name}: added twice")
        if self._open and self._open_bytes + tensor.nbytes > self._shard_bytes:
            self._write()
        self._open[name] = tensor.detach().to("cpu").contiguous()
        self._open_bytes += tensor.nbytes

    def close(self) -> list[Part]:
        """Write the open file, and return all files once they are written."""
        if self._open:
            self._write()
        self._settle()
        return self._parts

    def _write(self) -> None:
        self._settle()
        part = Part(f"part-{self._tag}-{len(self._parts):05d}.safetensors", tuple(self._open), self._open_bytes)
        self._parts.append(part)
        tensors, self._open, self._open_bytes = self._open, {}, 0
        self._writing = self._thread.submit(self._write_file, self._staging / part.file, tensors)

    def _write_file(self, path: Path, tensors: dict[str, Tensor]) -> None:
        infos = {name: info_of(tensor) for name, tensor in tensors.items()}
        with SafetensorsFile(path, infos, self._moved.set, durable=self._durable) as opened:
            for name, tensor in tensors.items():
                opened.write(name, tensor)

    def _settle(self) -> None:
        """Wait until the file in progress is written. Raise the writing thread's error."""
        writing, self._writing = self._writing, None
        moved_at = time.monotonic()
        while writing is not None and wait([writing], min(LOOK_S, self._timeout_s)).not_done:
            if self._moved.is_set():
                self._moved.clear()
                moved_at = time.monotonic()
                self._alive()
            elif time.monotonic() - moved_at > self._timeout_s:
                self._dead = True
                file = self._staging / self._parts[-1].file
                raise OSError(f"{file}: the storage accepted no bytes for {self._timeout_s:g} s; check that it works")
        if writing is not None:
            writing.result()


def staging_of(directory: str | Path) -> Path:
    """Return the staging directory next to `directory`, so that publishing is a rename."""
    directory = Path(directory)
    return directory.with_name(f".{directory.name}.writing")


def create_staging(directory: str | Path) -> Path:
    """Create an empty `staging_of(directory)`. Remove the files of an interrupted writer."""
    staging = staging_of(directory)
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(parents=True)
    return staging


def refuse_existing(directory: str | Path, overwrite: bool) -> None:
    """Raise `ModelError` if `directory` exists and must not be overwritten."""
    if Path(directory).exists() and not overwrite:
        raise ModelError(str(directory), ["already exists; choose another directory, or remove it"])


def check_space(directory: Path, nbytes: int) -> None:
    """Raise `ModelError` if the file system of `directory` has less than `nbytes` free."""
    free = shutil.disk_usage(directory).free
    if free < nbytes:
        raise ModelError(
            str(directory),
            [f"not enough disk space: needs {nbytes / 1e9:.2f} GB, {free / 1e9:.2f} GB are free"],
        )


def refuse_incomplete(directory: str | Path, parts: Iterable[Part], expected: Iterable[str]) -> None:
    """Raise `ModelError` unless the parts have each expected name exactly once and nothing else."""
    written = Counter(name for part in parts for name in part.names)
    expected = set(expected)
    problems = [f"{name}: not written" for name in expected - written.keys()]
    problems += [f"{name}: written, not part of the model" for name in written.keys() - expected]
    problems += [f"{name}: written {count} times" for name, count in written.items() if count > 1]
    if problems:
        raise ModelError(str(directory), sorted(problems))


def assemble(staging: Path, parts: Sequence[Part]) -> None:
    """Rename the parts to their final names, and write the index unless there is a single file."""
    names = shard_names(len(parts))
    for part, name in zip(parts, names, strict=True):
        (staging / part.file).rename(staging / name)
    write_index(staging, [Part(name, part.names, part.nbytes) for part, name in zip(parts, names, strict=True)])


def shard_names(count: int) -> list[str]:
    """Return the names that readers expect for `count` weight files."""
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def write_index(staging: Path, parts: Sequence[Part]) -> None:
    """Write the index, which maps each tensor to a file. A single file needs no index."""
    if len(parts) == 1:
        return
    file_of = {name: part.file for part in parts for name in part.names}
    index = {
        "metadata": {"total_size": sum(part.nbytes for part in parts)},
        "weight_map": dict(sorted(file_of.items())),
    }
    write_atomic(staging / INDEX_FILE, json.dumps(index, indent=2) + "\n")


def copy_metadata(
    template: str | Path,
    staging: Path,
    dtype: torch.dtype | None,
    quantization: Mapping[str, object] | None = None,
    config: Mapping[str, object] | None = None,
) -> None:
    """Copy every file in `template` that contains no weights: configs, tokenizer, chat template.

    config.json changes as follows:

    - `config`, if given, replaces the template's content.
    - `dtype`, if given, is set, so that readers with "auto" keep the precision written here.
    - `quantization` replaces quantization_config, which describes the template's weights. None removes the key.
    - The number of multi-token prediction layers becomes 0, because their weights are never written.
    """
    for source in sorted(Path(template).iterdir()):
        weights_or_hidden = source.name.endswith(_WEIGHT_SUFFIXES) or source.name.startswith(".")
        if source.is_file() and not weights_or_hidden:
            shutil.copyfile(source, staging / source.name)
    copied = json.loads((staging / "config.json").read_text())
    content = dict(config or copied)
    stored = content if dtype is None else with_dtype(content, dtype)
    stored = {k: 0 if k in MTP_NAMES and v else v for k, v in stored.items() if k != "quantization_config"}
    if quantization is not None:
        stored["quantization_config"] = quantization
    if stored != copied:
        write_config(staging, stored)


def with_dtype(config: Mapping[str, object], dtype: torch.dtype) -> dict[str, object]:
    """Return the config with the dtype set, under the spelling that the config already uses."""
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    return {**config, key: str(dtype).removeprefix("torch.")}


def write_config(staging: Path, config: Mapping[str, object]) -> None:
    write_atomic(staging / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")


def publish(staging: Path, directory: str | Path, overwrite: bool = False, *, durable: bool = True) -> None:
    """Rename the staging directory to `directory`. With `durable`, first wait until all files are on disk.

    With `overwrite`, replaces an existing directory; otherwise raises `ModelError` for it.
    """
    directory = Path(directory)
    refuse_existing(directory, overwrite)
    if durable:
        sync_tree(staging)
    replace_directory(staging, directory, durable=durable)
