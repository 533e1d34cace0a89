"""Names and shapes of a model's weights, from a directory's safetensors headers or as announced: no tensor data."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from .weight_group import TensorSpec

DTYPES = ("F32", "BF16", "F16")  # converted to the engine's own
SHOWN = 5  # names listed in an error


class BadWeights(ValueError):
    """These weights cannot replace the served ones; nothing was touched."""


@dataclass(frozen=True, slots=True)
class Manifest:
    source: str
    files: tuple[Path, ...]
    shapes: dict[str, tuple[int, ...]]

    @classmethod
    def of(cls, source: str, tensors: Iterable[TensorSpec]) -> Manifest:
        """What a sender announces, instead of files."""
        return cls(source, (), {spec.name: spec.shape for spec in tensors})

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Raises BadWeights when the directory is missing, empty, damaged, or lists a tensor twice.

        A safetensors header is checked against the file's size, so a file still being copied is refused too.
        """
        if not directory.is_dir():
            raise BadWeights(f"{directory}: no such directory")
        if not (directory / "config.json").is_file():
            raise BadWeights(f"{directory}: holds no config.json")
        files = tuple(sorted(directory.glob("*.safetensors")))
        if not files:
            raise BadWeights(f"{directory}: holds no .safetensors file")
        shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            try:
                with safe_open(file, framework="numpy") as shard:
                    for name in shard.keys():  # noqa: SIM118 (not a dict)
                        if name in shapes:
                            raise BadWeights(f"{file}: tensor {name} is in another file as well")
                        tensor = shard.get_slice(name)
                        if tensor.get_dtype() not in DTYPES:
                            raise BadWeights(f"{file}: {name} is {tensor.get_dtype()}, not one of {DTYPES}")
                        shapes[name] = tuple(tensor.get_shape())
            except (OSError, SafetensorError) as error:
                raise BadWeights(f"{file}: not a readable safetensors file ({error})") from error
        if _ties_head(directory):
            shapes.pop("lm_head.weight", None)  # may be stored or left out
        return cls(str(directory), files, shapes)

    def check_replaces(self, served: Manifest) -> None:
        """Raises BadWeights unless names and shapes are those of the served model."""
        problems = []
        for what, names in (
            ("missing", served.shapes.keys() - self.shapes.keys()),
            ("unknown", self.shapes.keys() - served.shapes.keys()),
        ):
            if names:
                problems.append(f"{len(names)} {what} tensors ({_some(names)})")
        wrong = [
            f"{name} is {self.shapes[name]}, served {shape}"
            for name, shape in served.shapes.items()
            if self.shapes.get(name, shape) != shape
        ]
        if wrong:
            problems.append(f"{len(wrong)} tensors of another shape ({_some(wrong)})")
        if problems:
            raise BadWeights(f"{self.source}: not the served model: {'; '.join(problems)}")


def _ties_head(directory: Path) -> bool:
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise BadWeights(f"{directory / 'config.json'}: not readable ({error})") from error
    return bool(config.get("tie_word_embeddings", False))


def _some(names) -> str:
    listed = sorted(names)
    return ", ".join(listed[:SHOWN]) + (", ..." if len(listed) > SHOWN else "")
