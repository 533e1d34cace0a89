"""Publish through directories that trainer and engines share, each with a model, a delta or an adapter."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor

from dppo_megatron.actor import Actor
from dppo_megatron.actor.lora import without_adapters
from dppo_megatron.common.ranks import Ranks
from dppo_megatron.config import Config
from dppo_megatron.engines.protocol import Engine
from dppo_megatron.hf import export_weights, save_hf
from dppo_megatron.hf.peft import save_peft
from dppo_megatron.run_dir import RunDir
from dppo_megatron.weights.delta import DamagedDelta, chain
from dppo_megatron.weights.fingerprint import add
from dppo_megatron.weights.place import lead

from .delta_writer import DeltaTooLarge, write_delta
from .transport import StoredAs, Transport

log = logging.getLogger(__name__)


class SharedStorage(Transport):
    """Writes every version to one directory with a model, a delta or an adapter.

    The source ranks write it and all engines read it. A delta changes the version that this process wrote before it, so
    the first version is a whole model.
    """

    def __init__(self, config: Config, actor: Actor, ranks: Ranks, stored: StoredAs):
        super().__init__()
        self._config = config
        self._ranks = ranks
        self._run = RunDir(config.run.dir)
        self._actor = actor
        self._stored = stored
        self._kept = self._take_over() if ranks.rank == 0 else []
        self._prepared: Path | None = None  # directory of the version that was prepared last
        self._deltas_left = 0  # deltas until the next whole version
        self._too_large = False  # a delta was too large; no other is tried before the next whole version
        self._frozen: dict[str, int] | None = None  # fingerprint of this rank's weights without adapters

    def _take_over(self) -> list[int]:
        """Return the versions that earlier attempts of the run left, oldest first; remove unfinished ones."""
        lead(self._run, self._config.weight_sync.directory)
        for unfinished in self._run.weights.glob(".v*.writing"):
            shutil.rmtree(unfinished, ignore_errors=True)
        return sorted(int(found.name[1:]) for found in self._run.weights.glob("v*") if found.name[1:].isdecimal())

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
            self.changed_share = write_delta(
                self._actor.model_chunks, self._actor.hf, directory, base, self._stored, self._observe()
            )
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

    def _save_whole(self, directory: Path) -> None:
        self.sent, self.changed_share = {}, None
        save_hf(
            self._actor.model_chunks,
            directory,
            template_dir=self._config.model.path,
            dtype=self._stored.dtype,
            quantization=self._stored.quantization,
            overwrite=True,
            observe=self._observe(),
            durable=False,  # a resumed run publishes again
        )

    def _measure(self, directory: Path) -> None:
        self.nbytes = sum(file.stat().st_size for file in directory.glob("*.safetensors"))

    def _observe(self) -> Callable[[str, Tensor], None] | None:
        return partial(add, self.sent) if self._config.weight_sync.fingerprint else None

    def _save_adapters(self, directory: Path) -> None:
        """Write the adapters. An engine applies them to its start weights, which must equal the trainer's."""
        chunks, model = self._actor.model_chunks, self._config.model
        self.sent = {}
        observe = self._observe()
        if observe is not None:
            if self._frozen is None:
                self._frozen = {}
                with without_adapters(chunks):
                    for name, tensor in export_weights(chunks, self._actor.hf, self._stored.dtype):
                        add(self._frozen, name, tensor)
            self.sent.update(self._frozen)
        save_peft(
            chunks,
            directory,
            self._actor.hf,
            model.lora,
            model.path.absolute(),
            dtype=self._stored.dtype,
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
        if version in self._kept:
            self._kept.remove(version)
        self._kept.append(version)
        keep = self._config.weight_sync.keep_versions
        needed = {path for kept in self._kept[-keep:] for path in _made_from(self._run.weights_of(kept))}
        for old in self._kept[:-keep]:
            if self._run.weights_of(old) not in needed:
                shutil.rmtree(self._run.weights_of(old), ignore_errors=True)
                self._kept.remove(old)


def _made_from(directory: Path) -> list[Path]:
    """Return the directories that a reader of `directory` reads."""
    try:
        model, deltas = chain(directory)
    except DamagedDelta:  # no engine can read it
        return []
    return [model, *deltas]
