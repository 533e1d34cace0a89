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


# Folders whose files start what others of the folder do not use.
BY_FILE = ("e2e", "parallel", "attack")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Two processes of pytest take a folder at a time, so that no server and no ranks are started twice."""
    for item in items:
        if item.config.pluginmanager.hasplugin("xdist"):  # .venv-integrations has none
            item.add_marker(pytest.mark.xdist_group(_group(item)))


def _group(item: pytest.Item) -> str:
    folder, file = item.path.relative_to(ROOT / "tests").parts[0], item.path.stem
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    if folder == "engines" and "server" in parameters:
        return "-".join(parameters["server"])
    return file if folder in BY_FILE else folder


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """f(size) -> that many ranks with Megatron-core, shared by all tests."""
    with ExitStack() as started:
        yield functools.cache(lambda size: started.enter_context(Ranks(size)))
