"""The process that builds the ranks' models; tests share it because it imports Megatron-core."""

from collections.abc import Iterator

import pytest

from dppo_megatron.run.plan import RankBuilder


@pytest.fixture(scope="session")
def builder() -> Iterator[RankBuilder]:
    with RankBuilder() as built:
        yield built
