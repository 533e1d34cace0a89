"""Reads a Hugging Face safetensors directory lazily: tensors are views of memory-mapped files."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from dppo_megatron.common.files import LFS_PROBLEM, each_once, is_lfs_pointer, read_foreign_json
from dppo_megatron.errors import shown

from .errors import ModelError
from .safetensors_file import DTYPES, TensorInfo

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAPPED_BYTES = 8 << 20  # read before `release` closes files, because reopening a file parses the header again


class SafetensorsDirectory:
    """Reads tensors by name from a model directory (`model.safetensors`, or shards with an index).

    Opening reads only the headers. Raises `ModelError` naming every problem: no safetensors, absent files that the
    index names, tensors that the index names and the files lack, truncated or malformed files.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self._open: dict[Path, safe_open] = {}
        self._read_bytes = 0
        self._file_of: dict[str, Path] = {}
        self.tensors: dict[str, TensorInfo] = {}
        problems: list[str] = []
        for file, names in self._index(problems).items():
            try:
                header = read_header(file)
            except ModelError as error:
                problems += error.problems
                continue
            names = names or list(header)
            absent = [name for name in names if name not in header]
            problems += [f"{name}: the index places it in {file.name}, which lacks it" for name in absent]
            self.tensors.update((name, header[name]) for name in names if name in header)
            self._file_of.update(dict.fromkeys(names, file))
        if problems:
            raise ModelError(str(self.directory), problems)

    def tensor(self, name: str) -> Tensor:
        """Return the tensor on the CPU as a view of the mapped file. Writing to the view changes no file."""
        file = self._file_of[name]
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        self._read_bytes += self.tensors[name].nbytes
        return self._open[file].get_tensor(name)

    def release(self) -> None:
        """Close the files once a few MB were read. The mapped pages are freed with the last returned tensor."""
        if self._read_bytes >= _MAPPED_BYTES:
            self._open.clear()
            self._read_bytes = 0

    def _index(self, problems: list[str]) -> dict[Path, list[str]]:
        """Map each file to the tensor names in the index.

        Without an index the list is empty, because the header has the names.
        """
        single, index = self.directory / SINGLE_FILE, self.directory / INDEX_FILE
        if single.is_file():
            return {single: []}
        if not index.is_file():
            message = (
                f"neither {SINGLE_FILE} nor {INDEX_FILE}: no weights to read; `hf download NAME --local-dir DIR` "
                "fetches them, `dppo-megatron convert megatron-to-hf` makes them of a Megatron checkpoint, and "
                "save_pretrained() of transformers makes them of pytorch_model.bin"
            )
            problems.append(message if self.directory.is_dir() else "no such directory")
            return {}
        try:
            weight_map = read_foreign_json(index).get("weight_map")
        except ValueError as error:
            problems.append(f"{INDEX_FILE}: not a valid index: {error}")
            return {}
        if not isinstance(weight_map, dict) or not weight_map:
            problems.append(f"{INDEX_FILE}: not a valid index: weight_map must name a file for each tensor")
            return {}
        names: dict[Path, list[str]] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file or not file.isprintable():
                problems.append(f"{INDEX_FILE}: {name}: {shown(file)} is not a file name in the directory")
                continue
            names.setdefault(self.directory / file, []).append(name)
        absent = sorted(file for file in names if not file.is_file())
        problems += [f"{file.name}: absent, the index places {len(names.pop(file))} tensors there" for file in absent]
        return names


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Return the tensors in a safetensors file. Raises `ModelError` if it is malformed or has unknown types."""
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
            header = {name: TensorInfo(DTYPES[at.get_dtype()], tuple(at.get_shape())) for name, at in slices.items()}
        with file.open("rb") as opened:  # for a repeated name safetensors would use the last tensor
            json.loads(opened.read(int.from_bytes(opened.read(8), "little")), object_pairs_hook=each_once)
        return header
    except (SafetensorError, OSError) as error:
        problem = f"not a safetensors file, or truncated ({file.stat().st_size} bytes): {error}"
        if is_lfs_pointer(file):
            problem = LFS_PROBLEM
    except ValueError as error:
        problem = f"its header: {error}; write the file again"
    except KeyError as error:
        problem = f"has tensors of type {error}, which no model here has"
    raise ModelError(str(file), [f"{file.name}: {problem}"])
