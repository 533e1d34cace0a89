"""Real ranks over gloo that run many scenarios in one spawn: each builds its own layout, and returns plain values.

A scenario is a function called as f(Rank): what `find(name)` of the module of scenarios gives. What rank 0 returns is
kept under its name.
"""

from __future__ import annotations

import importlib
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from dppo_megatron.fleet.registry import free_port
from tests.support.actor_cases import make_config


@dataclass(frozen=True)
class Rank:
    """What a scenario works with on one rank."""

    rank: int
    world_size: int
    models: Path  # model directories, shared
    directory: Path  # of this spawn, shared by its ranks
    meetings: Iterator[int]

    @contextmanager
    def actor(
        self,
        model: str = "qwen3",
        *,
        optimizer: dict | None = None,
        settings: dict | None = None,
        sections: dict[str, dict] | None = None,
        **parallel,
    ):
        """An Actor in the layout `parallel` of this spawn's world, with the model's weights; closed afterwards."""
        from dppo_megatron.actor import Actor, init_layout

        config = make_config(
            self.models / model,
            parallel={"world_size": self.world_size, **parallel},
            optimizer=optimizer,
            sections=sections,
            **(settings or {}),
        )
        self.meet()
        layout = init_layout(config)
        try:
            actor = Actor(config, layout)
            actor.load_hf(config.model.path)
            yield actor
        finally:
            layout.close()

    def meet(self) -> None:
        """Rank 0 finds a port for the next layout's rendezvous and tells the others."""
        note = self.directory / f"port-{next(self.meetings)}"
        if self.rank == 0:
            note.with_suffix(".tmp").write_text(str(free_port()))
            note.with_suffix(".tmp").rename(note)
        while not note.exists():
            time.sleep(0.01)
        os.environ["MASTER_PORT"] = note.read_text()


def run_ranks(
    world_size: int, names: list[str], models: Path, directory: Path, module: str = "tests.actor.scenarios.update"
) -> dict[str, Any]:
    """Scenario name -> what rank 0 returned, or the traceback (str) of the first rank that failed."""
    mp.spawn(_rank, args=(world_size, names, models, directory, module), nprocs=world_size)
    results = {}
    for name in names:
        failed = sorted(directory.glob(f"{name}.*.error"))
        path = directory / f"{name}.pt"
        results[name] = failed[0].read_text() if failed else torch.load(path, weights_only=False)
    return results


def _rank(rank: int, world_size: int, names: list[str], models: Path, directory: Path, module: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1")
    find = importlib.import_module(module).find

    for name in names:
        scenario: Callable[[Rank], Any] = find(name)
        own = directory / name
        own.mkdir(exist_ok=True)
        try:
            result = scenario(Rank(rank, world_size, models, own, count()))
            if rank == 0:
                torch.save(result, directory / f"{name}.pt")
        except Exception:
            (directory / f"{name}.{rank}.error").write_text(traceback.format_exc())
