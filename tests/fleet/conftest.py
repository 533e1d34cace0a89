"""A world of fake servers for the pool and the sampler."""

from __future__ import annotations

import pytest

from tests.support.fakes.fleet import A, B, FakeServer, World
from tests.support.fakes.orchestrator import sampling_config


@pytest.fixture
def world(tmp_path):
    def make(*servers: FakeServer, **engine) -> World:
        config = sampling_config(tmp_path / "run")
        settings = {"health_interval_s": 0.02, "health_timeout_s": 0.1, "health_failures": 2}
        settings |= {"unavailable_timeout_s": 5.0} | engine
        config = config.model_copy(update={"engine": config.engine.model_copy(update=settings)})
        made = World(config, dict(zip((A, B), servers or (FakeServer(), FakeServer()), strict=False)))
        made.publish(0)
        return made

    return make
