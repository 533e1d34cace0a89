"""Define the interface for the two transports that send a policy from the trainer ranks to the engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from dppo_megatron.common.dtypes import DTYPES
from dppo_megatron.common.ranks import Ranks
from dppo_megatron.config import Config
from dppo_megatron.errors import ExpectedError
from dppo_megatron.hf.export import Quantization
from dppo_megatron.rollout.engines.protocol import Engine, EngineInfo
from dppo_megatron.train.actor import Actor


class WeightSyncError(ExpectedError, RuntimeError):
    """The engines do not serve the trainer's weights. Raised on every trainer rank."""


class Transport(ABC):
    """Sends policy versions from the trainer ranks to the engines.

    `prepare`, `connect` and `send` are collective over all trainer ranks; `receive` runs on rank 0, for each engine.
    A version needs one `prepare`. Each attempt needs a `connect`, then `send` on every rank while the engines
    `receive`.
    """

    nbytes = 0  # bytes per version, once prepared
    changed_share: float | None = None  # share of changed elements, if a delta is sent

    def __init__(self, config: Config, actor: Actor, ranks: Ranks):
        engine = config.engine
        self._config, self._actor, self._ranks = config, actor, ranks
        self._dtype = DTYPES[engine.dtype].torch  # every transport exports weights in this dtype and quantization
        self._quantization: Quantization | None = None if engine.quantization == "none" else engine.quantization
        self.sent: dict[str, int] = {}  # fingerprint of this rank's weights, once sent

    @abstractmethod
    def prepare(self, version: int) -> None:
        """Do the work that all attempts share."""

    def prepare_again(self, version: int) -> None:  # noqa: B027
        """Prepare another attempt with engines that answer; replace a delta that none of them loaded."""

    def connect(self, engines: Mapping[str, EngineInfo]) -> None:  # noqa: B027
        """Prepare to send to these engines, by URL. Raises `WeightSyncError` on every rank."""

    @abstractmethod
    async def receive(self, engine: Engine, version: int) -> float:
        """Make an engine receive and load the policy; return how many seconds the engine did not sample.

        Raises the engine client's errors.
        """

    def send(self) -> str | None:
        """Send this rank's weights. Return why this failed, or None. A failed engine raises no error here."""
        return None

    def abort(self, reason: str) -> None:  # noqa: B027
        """End the transfer for all sides. Called on rank 0, in the engine thread, when an engine failed."""

    def directory(self, version: int) -> Path | None:
        """Return the directory that a starting engine loads, or None if the policy must be sent again."""
        return None

    def after_confirmation(self, version: int) -> None:  # noqa: B027
        """Release old versions on rank 0, after the engines confirmed the policy."""

    def close(self) -> None:  # noqa: B027
        """Stop this rank's part in the transfer."""
