"""How a policy gets from the trainer ranks to the engines: one shape, two ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from dppo_megatron.engines.protocol import Engine, EngineInfo
from dppo_megatron.errors import ExpectedError
from dppo_megatron.hf.export import Quantization
from dppo_megatron.weights.fingerprint import Fingerprint


class WeightSyncError(ExpectedError, RuntimeError):
    """The engines do not serve the weights that the trainer holds. Raised on every trainer rank."""


@dataclass(frozen=True, slots=True)
class StoredAs:
    """How the exporter hands weights to the engines, whichever way they travel."""

    dtype: torch.dtype
    quantization: Quantization | None = None


class Transport(Protocol):
    """`prepare`, `connect` and `send` are collective over all trainer ranks; `receive` runs on rank 0, for each engine.

    One `prepare` a version; then for each attempt `connect`, after it `send` on every rank while the engines `receive`.
    """

    nbytes: int  # that travel of one version, once prepared
    changed_share: float | None  # of its elements, where a delta travels
    sent: Fingerprint  # of what this rank sent of the version, once sent

    def prepare(self, version: int) -> None:
        """Does once what all attempts share."""
        ...

    def prepare_again(self, version: int) -> None:
        """Before another attempt with engines that answer: sends the whole where they did not take what changed."""
        ...

    def connect(self, engines: Mapping[str, EngineInfo]) -> None:
        """Prepares to send to these engines, by URL. Raises `WeightSyncError` on every rank."""
        ...

    async def receive(self, engine: Engine, version: int) -> float:
        """Has one engine receive and load the policy; returns the seconds in which it sampled nothing. Raises what the
        engine's client raises."""
        ...

    def send(self) -> str | None:
        """Sends this rank's weights; returns why it failed, or None. An engine that fails raises nothing here."""
        ...

    def abort(self, reason: str) -> None:
        """Rank 0, in the engines' thread, when one of them failed: ends the transfer for all."""
        ...

    def directory(self, version: int) -> Path | None:
        """Where an engine that starts finds the policy; None where it must be sent again."""
        ...

    def after_confirmation(self, version: int) -> None:
        """Rank 0, after the engines confirmed the policy."""
        ...

    def close(self) -> None: ...
