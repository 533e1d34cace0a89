"""Write a version of the weights as a delta of the version in another directory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor, nn

from dppo_megatron.common.ranks import Ranks
from dppo_megatron.hf import HFModelConfig, export_weights
from dppo_megatron.hf.export import write_parts
from dppo_megatron.hf.safetensors_writer import Part
from dppo_megatron.hf.staged import write_staged
from dppo_megatron.hf.turns import Turns
from dppo_megatron.weights.delta import DamagedDelta, Version, change, write_base

from .transport import StoredAs

LARGEST_SHARE = 0.8  # share of a model's bytes; a larger delta is not written


class DeltaTooLarge(RuntimeError):
    """The delta would be nearly as large as the model; its files are removed."""


def write_delta(
    chunks: Sequence[nn.Module],
    hf: HFModelConfig,
    directory: Path,
    base: Path,
    stored: StoredAs,
    observe: Callable[[str, Tensor], None] | None,
) -> float:
    """Write the weights to `directory` as a delta of the version in `base` next to it.

    Returns the share of all elements that changed. Everything else is as in `save_hf`, but all ranks synchronise two
    more times. Raises `DeltaTooLarge` on every rank, and `DamagedDelta` if `base` cannot be read or has other tensors.
    """
    everyone = Ranks()
    opened: list[Version] = []
    everyone.on_every_rank(lambda: opened.append(Version(base)), f"{base} to be opened")
    (before,) = opened
    most = LARGEST_SHARE * before.model_bytes
    counts: Counter[str] = Counter()  # elements of the tensors that this rank exports
    turns = Turns(everyone, f"writes to {directory}")

    def pack(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if observe is not None:
            observe(name, tensor)
        counts.update(tensors=1, elements=tensor.numel())
        found = change(before.tensor(name), tensor.detach().to("cpu"))
        if found is None:
            return {}
        packed = found.stored(name)
        counts.update(changed=found.changed, nbytes=sum(part.nbytes for part in packed.values()))
        if counts["nbytes"] > most:
            raise DeltaTooLarge(f"{directory}: more than {LARGEST_SHARE:.0%} of the model")
        return packed

    def write(staging: Path) -> list[Part]:
        exported = export_weights(chunks, hf, stored.dtype, quantization=stored.quantization, before_gather=turns)
        return write_parts(staging, exported, pack, everyone, durable=False)

    def complete(staging: Path, parts: list[Part]) -> None:
        if (nbytes := sum(part.nbytes for part in parts)) > most:
            raise DeltaTooLarge(f"{directory}: {nbytes:,} bytes, more than {LARGEST_SHARE:.0%} of the model")
        write_base(staging, base.name)

    write_staged(directory, None, everyone, write=write, complete=complete, overwrite=True, durable=False)
    mine = [counts[name] for name in ("tensors", "elements", "changed")]
    tensors, elements, changed = map(sum, zip(*everyone.gather(mine, "how much of the weights changed"), strict=True))
    if tensors != len(before.names):
        raise DamagedDelta(f"{directory}: {tensors} tensors were exported, {base} has {len(before.names)}")
    return changed / max(elements, 1)
