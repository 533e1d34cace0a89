"""An engine that the publisher excludes for its fingerprint must not serve after the pool loads the directory again.

Two engines and shared storage, the default. Run from a clone's root:
PYTHONPATH=. python tests/reproducers/readmitted_engine.py
"""

import asyncio
import logging
import sys
import tempfile
from pathlib import Path

from dppo_megatron.config import with_settings
from dppo_megatron.weights.fingerprint import differing
from tests.support.fakes.fleet import A, B, FakeEngine, FakeServer, World, many
from tests.support.fakes.orchestrator import sampling_config

logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
asked = []


class WrongLoader(FakeEngine):
    """Engine B exchanges two projections or keeps an old expert at every load: other bits, log-probs as expected."""

    async def weights_fingerprint(self):
        asked.append(self.url)
        found = await super().weights_fingerprint()
        return {group: value + 1000 * (self.url == B) for group, value in found.items()}


with tempfile.TemporaryDirectory() as directory:
    checks = {"health_interval_s": 0.05, "health_timeout_s": 0.5, "health_failures": 2, "unavailable_timeout_s": 5.0}
    world = World(
        with_settings(sampling_config(Path(directory) / "run"), engine=checks), {A: FakeServer(), B: FakeServer()}
    )
    world.build = lambda config, url: WrongLoader(url, world.servers[url])
    # The publisher: both engines load policy 1, it compares fingerprints and confirms only A (Publisher._confirm).
    world.publish(1, to=(A, B))
    held = {url: asyncio.run(world.build(world.config, url).weights_fingerprint()) for url in (A, B)}
    confirmed = tuple(url for url in (A, B) if not differing({"layer 0": 1}, held[url]))
    print("the publisher confirms", confirmed, "and excludes", sorted({A, B} - set(confirmed)))
    world.publish(1, to=confirmed)
    asked.clear()

    async def use():
        async with world.live() as sampler:
            await asyncio.sleep(1.0)
            await many(sampler, 20)

    asyncio.run(use())
    print("fingerprints that the pool requested:", len(asked))
    print("groups sampled by A and B:", [len(world.servers[url].asked) for url in (A, B)])
    sys.exit(bool(world.servers[B].asked) or not asked)
