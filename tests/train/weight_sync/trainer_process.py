"""A rank of a trainer that publishes policies to running engines.

It publishes each directory as versions 1, 2, ...; a file OUT.<version> appears before each publish. The policy `update`
is the last one after an update, and also written to OUT.<version>.weights. `wait` stands for no publish: it lasts until
every engine is idle.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np

from dppo_megatron.common.retry import wait_until
from tests.support.ranks import rendezvous

UPDATE, WAIT = "update", "wait"
WAIT_S = 60.0
PROBE = np.array([7, 21, 21, 50, 4, 63, 12, 30, 9, 44, 18, 2], dtype=np.int32)


def publish_all(rank: int, tree: dict, out: Path, policies: list[Path | str]) -> list[dict[str, Any]]:
    """Return a record of each publish, on rank 0 with the scores of PROBE by every engine."""
    from dppo_megatron.common.ranks import Ranks
    from dppo_megatron.config import Config
    from dppo_megatron.hf import save_hf
    from dppo_megatron.objectives import build_objective
    from dppo_megatron.rollout.fleet.live_engines import LiveEngines
    from dppo_megatron.train.actor import Actor, init_layout
    from dppo_megatron.train.weight_sync import WeightSyncError, build_publisher
    from dppo_megatron.train.weight_sync.engine_thread import EngineThread
    from tests.support.actor_cases import micro_batches, sequences

    config = Config.model_validate(tree)
    rendezvous(out.parent)
    layout = init_layout(config)
    actor = Actor(config, layout)
    engines = EngineThread(LiveEngines(config)) if rank == 0 else None
    publisher = build_publisher(config, actor, engines, PROBE)
    records = []
    for version, policy in enumerate(policies, 1):
        if version > 1:
            publisher.onload_actor()
        if policy == WAIT:
            if rank == 0:
                Path(f"{out}.{version}").touch()
            Ranks(2 * WAIT_S).from_rank_zero(lambda: _wait_until_idle(engines), "the engines to be idle")
            continue
        if policy == UPDATE:
            actor.train_update(micro_batches(sequences(), 1), build_objective("dppo_binary_tv"))
            save_hf(actor.model_chunks, f"{out}.{version}.weights", config.model.path)
        else:
            actor.load_hf(policy)
        if rank == 0:
            Path(f"{out}.{version}").touch()
        started = time.monotonic()
        try:
            published = publisher.publish(version)
            record = {
                "engines": len(config.engine.urls) - published.unconfirmed,
                "difference": published.difference.largest,
                "changed_share": published.changed_share,
                "pause_s": published.pause_s,
            }
        except WeightSyncError as error:
            record = {"error": str(error)}
        records.append(record | {"seconds": time.monotonic() - started, "scores": _scores(engines)})
    publisher.close()
    layout.close()
    return records


def _wait_until_idle(engines) -> None:
    def idle() -> bool:
        answers, silent = engines.start(lambda live: live.answering()).result()
        return not silent and all(info.updating_s is None for info in answers.values())

    assert wait_until(idle, WAIT_S, poll_s=0.1)


def _scores(engines) -> dict[str, list[float]]:
    if engines is None:
        return {}
    urls, _ = engines.start(lambda live: live.answering()).result()
    scored = engines.start(lambda live: live.on(urls, lambda engine: engine.score(PROBE))).result()
    return {url: reply.tolist() for url, reply in scored.items() if not isinstance(reply, BaseException)}
