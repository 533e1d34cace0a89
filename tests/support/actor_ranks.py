"""Runs actors on ranks, for tests that run there and for scenarios: functions called as f(Rank, ...) on every rank."""

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dppo_megatron.config import Config
from tests.support.actor_cases import actor_config
from tests.support.ranks import Ranks, rendezvous


@dataclass(frozen=True)
class Rank:
    """Gives a scenario the rank, the models and a directory."""

    rank: int
    world_size: int
    models: Path  # model directories, shared
    directory: Path  # for this scenario, shared by all ranks

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
        """Yield an Actor with the model's weights in the layout `parallel`. Closes it afterwards."""
        config = actor_config(
            self.models / model,
            parallel={"world_size": self.world_size, **parallel},
            optimizer=optimizer,
            sections=sections,
            **(settings or {}),
        )
        self.rendezvous()
        with started_actor(config) as actor:
            actor.load_hf(config.model.path)
            yield actor

    def rendezvous(self) -> None:
        """Agree on the port of the next layout."""
        rendezvous(self.directory)


@contextmanager
def started_actor(config: Config) -> Iterator[Any]:
    """Yield an Actor without weights after a rendezvous. Closes the layout afterwards."""
    from dppo_megatron.train.actor import Actor, init_layout

    layout = init_layout(config)
    try:
        yield Actor(config, layout)
    finally:
        layout.close()


def on_ranks(*sizes: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make body(rank: Rank, **parameters) a test that runs and asserts on every rank, for each world size in `sizes`.

    `@pytest.mark.parametrize` above gives the parameters, and `size` if `sizes` is empty. The test folder needs the
    fixture `models`.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def test(ranks: Callable[[int], Ranks], models: Path, tmp_path: Path, size: int = 0, **given: Any) -> None:
            run_scenario(ranks(size or sizes[0]), test, models, tmp_path, *given.values())

        fixtures = ["ranks", "models", "tmp_path", *(["size"] if len(sizes) != 1 else [])]
        names = [*fixtures, *list(inspect.signature(body).parameters)[1:]]
        functools.update_wrapper(test, body).__signature__ = inspect.Signature(
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        )
        return pytest.mark.parametrize("size", sizes)(test) if len(sizes) > 1 else test

    return decorate


def slow(*values: Any) -> Any:
    """Return a parameter set that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def run_scenario(ranks: Ranks, scenario: Callable[..., Any], models: Path, directory: Path, *arguments: Any) -> Any:
    """Run scenario(Rank, *arguments) on all `ranks`, and return rank 0's result. Raises RankError."""
    directory.mkdir(parents=True, exist_ok=True)
    run = {"scenario": scenario, "models": models, "directory": directory, "arguments": arguments}
    return ranks.run(_on_rank, **run)[0]


def _on_rank(rank: int, scenario: Callable[..., Any], models: Path, directory: Path, arguments: tuple) -> Any:
    scenario = getattr(scenario, "__wrapped__", scenario)  # the body of a test
    result = scenario(Rank(rank, int(os.environ["WORLD_SIZE"]), models, directory), *arguments)
    return result if rank == 0 else None
