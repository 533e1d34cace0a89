"""Transport by directories that trainer and engines share."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from dppo_megatron.actor import Actor
from dppo_megatron.actor.lora import without_adapters
from dppo_megatron.common.ranks import Ranks
from dppo_megatron.config import Config
from dppo_megatron.engines.protocol import Engine, EngineInfo
from dppo_megatron.hf import export_weights, save_hf
from dppo_megatron.hf.peft import save_peft
from dppo_megatron.run_dir import RunDir
from dppo_megatron.weights.fingerprint import Fingerprint, add

from .transport import StoredAs


class SharedStorage:
    """Every version is one directory, of a model or an adapter, written by its source ranks and read by all engines."""

    def __init__(self, config: Config, actor: Actor, ranks: Ranks, stored: StoredAs):
        self._config = config
        self._run = RunDir(config.run.dir)
        self._actor = actor
        self._stored = stored
        self._kept = self._take_over() if ranks.rank == 0 else []
        self._prepared: Path | None = None
        self.nbytes = 0
        self.sent: Fingerprint = {}
        self._frozen: Fingerprint | None = None  # of this rank's share of the weights beside the adapters

    def _take_over(self) -> list[int]:
        """Versions that earlier attempts of the run left, oldest first; unfinished ones are removed."""
        for unfinished in self._run.weights.glob(".v*.writing"):
            shutil.rmtree(unfinished, ignore_errors=True)
        return sorted(int(found.name[1:]) for found in self._run.weights.glob("v*") if found.name[1:].isdecimal())

    def prepare(self, version: int) -> None:
        self._prepared = self.directory(version)
        self.sent = {}
        observe = partial(add, self.sent) if self._config.weight_sync.fingerprint else None
        if self._config.weight_sync.lora == "adapter":
            self._save_adapters(observe)
        else:
            save_hf(
                self._actor.model_chunks,
                self._prepared,
                template_dir=self._config.model.path,
                dtype=self._stored.dtype,
                quantization=self._stored.quantization,
                overwrite=True,
                observe=observe,
            )
        self.nbytes = sum(file.stat().st_size for file in self._prepared.glob("*.safetensors"))

    def _save_adapters(self, observe: Callable[[str, Tensor], None] | None) -> None:
        """An engine holds them beside the weights that it started with, which must be the trainer's."""
        chunks, model = self._actor.model_chunks, self._config.model
        if observe is not None:
            if self._frozen is None:
                self._frozen = {}
                with without_adapters(chunks):
                    for name, tensor in export_weights(chunks, self._actor.hf, self._stored.dtype):
                        add(self._frozen, name, tensor)
            self.sent.update(self._frozen)
        save_peft(
            chunks,
            self._prepared,
            self._actor.hf,
            model.lora,
            model.path.absolute(),
            dtype=self._stored.dtype,
            overwrite=True,
            folded=True,
            observe=observe,
        )

    def connect(self, engines: Mapping[str, EngineInfo]) -> None:
        pass

    async def receive(self, engine: Engine, version: int) -> None:
        await engine.load_weights(self._prepared, version, self._config.rollout.on_update)

    def send(self) -> str | None:
        return None

    def abort(self, reason: str) -> None:
        pass

    def directory(self, version: int) -> Path | None:
        return self._run.weights_of(version).resolve()

    def after_confirmation(self, version: int) -> None:
        """Keeps those published last, the published one always: an engine that restarts loads it."""
        if version in self._kept:
            self._kept.remove(version)
        self._kept.append(version)
        while len(self._kept) > self._config.weight_sync.keep_versions:
            shutil.rmtree(self._run.weights_of(self._kept.pop(0)), ignore_errors=True)

    def close(self) -> None:
        pass
