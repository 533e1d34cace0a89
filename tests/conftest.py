"""Every process that a test starts finds this repository, `tests` included, before anything else."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.ranks import Ranks

ROOT = Path(__file__).parents[1]
PATHS = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(PATHS))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """f(size) -> that many ranks with Megatron-core, shared by all tests."""
    with ExitStack() as started:
        yield functools.cache(lambda size: started.enter_context(Ranks(size)))
