"""Publish through directories that trainer and engines share, each with a model, a delta or an adapter."""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor

from dppo_megatron.common.ranks import Ranks
from dppo_megatron.config import Config
from dppo_megatron.hf import export_weights, save_hf
from dppo_megatron.hf.export import write_parts
from dppo_megatron.hf.peft import save_peft
from dppo_megatron.hf.safetensors_writer import Part
from dppo_megatron.hf.staged import write_staged
from dppo_megatron.hf.turns import Turns
from dppo_megatron.rollout.engines.protocol import Engine
from dppo_megatron.run_dir import RunDir
from dppo_megatron.train.actor import Actor
from dppo_megatron.train.actor.lora import without_adapters
from dppo_megatron.weights.delta import DamagedDelta, Version, chain, change, write_base
from dppo_megatron.weights.fingerprint import add
from dppo_megatron.weights.place import lead

from .transport import Transport

log = logging.getLogger(__name__)

FILE_BYTES = 128 << 20  # a file is written while the weights for the next file are exported and summed
LARGEST_SHARE = 0.8  # share of a model's bytes; a larger delta is not written


class DeltaTooLarge(RuntimeError):
    """The delta would be nearly as large as the model; the delta's files are removed."""


class SharedStorage(Transport):
    """Writes every version to a directory with a model, a delta or an adapter.

    The source ranks write the directory and all engines read it. A delta changes the version that this process wrote
    before, so the first version is a whole model.
    """

    def __init__(self, config: Config, actor: Actor, ranks: Ranks):
        super().__init__(config, actor, ranks)
        self._run = RunDir(config.run.dir)
        self._versions = self._take_over() if ranks.rank == 0 else []
        self._prepared: Path | None = None  # the directory that was prepared last
        self._deltas_left = 0  # deltas until the next whole version
        self._too_large = False  # a delta was too large; no other is tried before the next whole version
        self._frozen: dict[str, int] | None = None  # this rank's weight fingerprint without adapters

    def _take_over(self) -> list[int]:
        """Return the versions that the run's earlier attempts left, oldest first; remove unfinished versions."""
        lead(self._run, self._config.weight_sync.directory)
        for unfinished in self._run.weights.glob(".v*.writing"):
            shutil.rmtree(unfinished, ignore_errors=True)
        return sorted(int(path.name[1:]) for path in self._run.weights.glob("v*") if path.name[1:].isdecimal())

    def prepare(self, version: int) -> None:
        base, directory = self._prepared, self.directory(version)
        self._prepared = directory
        if self._config.weight_sync.lora == "adapter":
            self._save_adapters(directory)
        elif base is None or not self._deltas_left or base == directory:
            self._deltas_left, self._too_large = self._config.weight_sync.full_every - 1, False
            self._save_whole(directory)
        elif not self._save_delta(directory, base):
            self._save_whole(directory)
        self._measure(directory)

    def prepare_again(self, version: int) -> None:
        if self.changed_share is not None:
            if self._ranks.rank == 0:
                log.warning("policy %d: no engine loaded the delta; the whole model is published", version)
            self._save_whole(self.directory(version))
            self._measure(self.directory(version))

    def _save_delta(self, directory: Path, base: Path) -> bool:
        """Write a delta; return False if the version must be written as a whole."""
        self._deltas_left -= 1
        if self._too_large:
            return False
        try:
            self.sent = {}
            self.changed_share = self._write_delta(directory, base)
        except DeltaTooLarge as error:
            self._too_large = True
            reason = f"{error}; the next {self._deltas_left + 1} are whole too (weight_sync.full_every)"
        except DamagedDelta as error:
            reason = str(error)
        else:
            return True
        if self._ranks.rank == 0:
            log.warning("the whole model is published instead of a delta: %s", reason)
        return False

    def _write_delta(self, directory: Path, base: Path) -> float:
        """Write the weights to `directory` as a delta on the version in `base`, a directory next to it.

        Returns the share of all elements that changed. Everything else is as in `save_hf`, but all ranks synchronize
        two more times. Raises `DeltaTooLarge` on every rank, and `DamagedDelta` if `base` cannot be read or has other
        tensors.
        """
        everyone = Ranks()
        opened: list[Version] = []
        everyone.on_every_rank(lambda: opened.append(Version(base)), f"{base} to be opened")
        (base_version,) = opened
        limit_bytes = LARGEST_SHARE * base_version.model_bytes
        counts: Counter[str] = Counter()  # over the tensors that this rank exports
        turns = Turns(everyone, f"writes to {directory}")

        def pack(name: str, tensor: Tensor) -> dict[str, Tensor]:
            counts.update(tensors=1, elements=tensor.numel())
            tensor_change = change(base_version.tensor(name), tensor.detach().to("cpu"))
            if tensor_change is None:
                return {}
            packed = tensor_change.stored(name)
            counts.update(changed=tensor_change.changed, nbytes=sum(part.nbytes for part in packed.values()))
            if counts["nbytes"] > limit_bytes:
                raise DeltaTooLarge(f"{directory}: more than {LARGEST_SHARE:.0%} of the model")
            return packed

        def write(staging: Path) -> list[Part]:
            chunks, hf = self._actor.model_chunks, self._actor.hf
            exported = export_weights(chunks, hf, self._dtype, quantization=self._quantization, before_gather=turns)
            return write_parts(
                staging, exported, everyone, FILE_BYTES, pack=pack, observe=self._observe(), durable=False
            )

        def complete(staging: Path, parts: list[Part]) -> None:
            if (nbytes := sum(part.nbytes for part in parts)) > limit_bytes:
                raise DeltaTooLarge(f"{directory}: {nbytes:,} bytes, more than {LARGEST_SHARE:.0%} of the model")
            write_base(staging, base.name)

        write_staged(directory, None, everyone, write=write, complete=complete, overwrite=True, durable=False)
        mine = [counts[name] for name in ("tensors", "elements", "changed")]
        gathered = everyone.gather(mine, "how much of the weights changed")
        tensors, elements, changed = map(sum, zip(*gathered, strict=True))
        if tensors != len(base_version.names):
            raise DamagedDelta(f"{directory}: {tensors} tensors were exported, {base} has {len(base_version.names)}")
        return changed / max(elements, 1)

    def _save_whole(self, directory: Path) -> None:
        self.sent, self.changed_share = {}, None
        save_hf(
            self._actor.model_chunks,
            directory,
            template_dir=self._config.model.path,
            dtype=self._dtype,
            shard_bytes=FILE_BYTES,
            quantization=self._quantization,
            overwrite=True,
            observe=self._observe(),
            durable=False,  # a resumed run publishes again
        )

    def _measure(self, directory: Path) -> None:
        self.nbytes = sum(file.stat().st_size for file in directory.glob("*.safetensors"))

    def _observe(self) -> Callable[[str, Tensor], None] | None:
        return partial(add, self.sent) if self._config.weight_sync.fingerprint else None

    def _save_adapters(self, directory: Path) -> None:
        """Write the adapters. An engine applies them to the start weights, which must equal the trainer's."""
        chunks, model = self._actor.model_chunks, self._config.model
        self.sent = {}
        observe = self._observe()
        if observe is not None:
            if self._frozen is None:
                self._frozen = {}
                with without_adapters(chunks):
                    for name, tensor in export_weights(chunks, self._actor.hf, self._dtype):
                        add(self._frozen, name, tensor)
            self.sent.update(self._frozen)
        save_peft(
            chunks,
            directory,
            self._actor.hf,
            model.lora,
            model.path.absolute(),
            dtype=self._dtype,
            overwrite=True,
            folded=True,
            observe=observe,
        )

    async def receive(self, engine: Engine, version: int) -> float:
        return await engine.load_weights(self.directory(version), version, self._config.rollout.on_update)

    def directory(self, version: int) -> Path:
        return self._run.weights_of(version).resolve()

    def after_confirmation(self, version: int) -> None:
        """Remove old versions, but not the directories that the kept versions are based on.

        The published version is always kept, because an engine that restarts loads it.
        """
        if version in self._versions:
            self._versions.remove(version)
        self._versions.append(version)
        keep = self._config.weight_sync.keep_versions
        needed = {
            path for kept_version in self._versions[-keep:] for path in _made_from(self._run.weights_of(kept_version))
        }
        for old in self._versions[:-keep]:
            if self._run.weights_of(old) not in needed:
                shutil.rmtree(self._run.weights_of(old), ignore_errors=True)
                self._versions.remove(old)


def _made_from(directory: Path) -> list[Path]:
    """Return the directories that make up a version: the model and all deltas; empty if a delta is damaged."""
    try:
        model, deltas = chain(directory)
    except DamagedDelta:  # no engine can read it
        return []
    return [model, *deltas]
