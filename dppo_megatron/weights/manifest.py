"""Read a model's tensor names, shapes and FP8 tensors from safetensors headers or a broadcast plan, without data."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from dppo_megatron.common.dtypes import DTYPES
from dppo_megatron.hf import ModelError, WeightMap, read_hf_config

from .broadcast_plan import TensorSpec
from .delta import DamagedDelta, Version, is_delta

_FP8 = DTYPES["fp8"]
_STORED = tuple(dtype.safetensors for dtype in DTYPES.values())  # an engine casts all but FP8 to the served dtype
SHOWN = 5  # names in an error


class BadWeights(ValueError):
    """These weights cannot replace the served weights, which are unchanged."""


class UnreadableWeights(RuntimeError):
    """A directory cannot be read completely now. Another engine, or a later attempt, may succeed."""


@dataclass(frozen=True, slots=True)
class Manifest:
    source: str
    shapes: dict[str, tuple[int, ...]]
    fp8: frozenset[str]  # names of the e4m3 tensors

    @classmethod
    def from_tensors(cls, source: str, tensors: Iterable[TensorSpec]) -> Manifest:
        """Return the manifest of a broadcast from the planned tensors."""
        specs = list(tensors)
        fp8 = frozenset(spec.name for spec in specs if spec.dtype == _FP8.long)
        return cls(source, {spec.name: spec.shape for spec in specs}, fp8)

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read a directory's manifest, without tensors that the model does not need.

        A multi-token prediction layer, for example, is not needed. For a delta (`weights.delta`), this is the manifest
        of the model that the delta changes; the delta headers are read too.

        Raises UnreadableWeights when the directory is missing, empty, or damaged. Raises BadWeights for a tensor that
        is in two files or has an unusable dtype. A safetensors header is checked against the file size, so an
        unfinished copy is found too.
        """
        source = str(directory)
        try:
            if is_delta(directory):
                directory = Version(directory).model
            model = read_hf_config(directory)
            is_ignored = WeightMap(model).is_ignored
            files = tuple(sorted(directory.glob("*.safetensors")))
        except (OSError, ModelError, DamagedDelta) as error:
            raise UnreadableWeights(f"{source}: not readable ({error})") from error
        if not files:
            raise UnreadableWeights(f"{directory}: has no .safetensors file")
        shapes: dict[str, tuple[int, ...]] = {}
        fp8 = set()
        for file in files:
            try:
                with safe_open(file, framework="numpy") as shard:
                    for name in shard.keys():  # noqa: SIM118 (not a dict)
                        if is_ignored(name):
                            continue
                        if name in shapes:
                            raise BadWeights(f"{file}: tensor {name} is in another file as well")
                        tensor = shard.get_slice(name)
                        if tensor.get_dtype() not in _STORED:
                            raise BadWeights(f"{file}: {name} is {tensor.get_dtype()}, not one of {_STORED}")
                        shapes[name] = tuple(tensor.get_shape())
                        if tensor.get_dtype() == _FP8.safetensors:
                            fp8.add(name)
            except (OSError, SafetensorError) as error:
                raise UnreadableWeights(f"{file}: not a readable safetensors file ({error})") from error
        if model.tied_embeddings:
            shapes.pop("lm_head.weight", None)  # a tied head may be stored or omitted
        return cls(source, shapes, frozenset(fp8))

    def check_replaces(self, served: Manifest) -> None:
        """Raise BadWeights unless names, shapes and the choice of FP8 tensors equal the served model's."""
        common = self.shapes.keys() & served.shapes.keys()
        wrong = [name for name in common if self.shapes[name] != served.shapes[name]]
        differences: dict[str, Collection[str]] = {
            "missing tensors": served.shapes.keys() - self.shapes.keys(),
            "unknown tensors": self.shapes.keys() - served.shapes.keys(),
            "tensors with a different shape": [f"{n} is {self.shapes[n]}, served {served.shapes[n]}" for n in wrong],
            # An engine would cast them, which makes their scales meaningless.
            "tensors that are FP8 in only one of the two": (self.fp8 ^ served.fp8) & common,
        }
        if problems := [f"{len(names)} {kind} ({_shown_names(names)})" for kind, names in differences.items() if names]:
            raise BadWeights(f"{self.source}: does not match the model of the server: {'; '.join(problems)}")


def _shown_names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:SHOWN]) + (", ..." if len(ordered) > SHOWN else "")
