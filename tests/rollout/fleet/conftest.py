"""A world of fake servers for the pool and the sampler."""

import pytest

from dppo_megatron.config import with_settings
from tests.support.fakes.fleet import A, B, FakeServer, World
from tests.support.fakes.orchestrator import sampling_config


@pytest.fixture
def world(tmp_path):
    def make(*servers: FakeServer, update_s: float = 600, **engine) -> World:
        config = with_settings(sampling_config(tmp_path / "run"), weight_sync={"timeout_s": update_s})
        settings = {"health_interval_s": 0.02, "health_timeout_s": 0.1, "health_failures": 2}
        settings |= {"unavailable_timeout_s": 5.0} | engine
        made = World(
            with_settings(config, engine=settings),
            dict(zip((A, B), servers or (FakeServer(), FakeServer()), strict=False)),
        )
        made.publish(0)
        return made

    return make
