"""The publisher of a run, from its config."""

from __future__ import annotations

import numpy as np

from dppo_megatron.actor import Actor
from dppo_megatron.common.dtypes import DTYPES
from dppo_megatron.config import Config

from .broadcast import Broadcast
from .engine_thread import EngineThread
from .publisher import Publisher
from .ranks import Ranks
from .shared_storage import SharedStorage
from .transport import StoredAs


def build_publisher(config: Config, actor: Actor, engines: EngineThread | None, probe: np.ndarray | None) -> Publisher:
    """Collective; `engines` and `probe` are those of rank 0, the other ranks need none."""
    engine = config.engine
    stored = StoredAs(DTYPES[engine.dtype].torch, None if engine.quantization == "none" else engine.quantization)
    # The others wait for rank 0's word while it waits for an engine to come back or to end its update.
    ranks = Ranks(timeout_s=config.engine.unavailable_timeout_s + 4 * config.weight_sync.timeout_s)
    if config.weight_sync.transport == "broadcast":
        transport = Broadcast(config, actor, engines, ranks, stored)
    else:
        transport = SharedStorage(config, actor, ranks, stored)
    return Publisher(config, actor, engines, ranks, transport, ranks.from_first(lambda: probe))
