"""Makes every process that a test starts find this repository, including `tests`, before anything else."""

import asyncio
import functools
import gc
import inspect
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests import schedule
from tests.support.ranks import Ranks

ROOT = Path(__file__).parents[1]
PATHS = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(PATHS))


def pytest_addoption(parser: pytest.Parser) -> None:
    shards = [*map(str, range(schedule.SHARDS)), "all"]
    parser.addoption("--shard", choices=shards, default="all", help="the slow tests to run (tests/schedule.py)")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect slow tests of other shards. Every kind of slow test needs a case that runs in each shard."""
    if (chosen := config.getoption("--shard")) == "all":
        return
    slow_marks = set(re.findall(r"not (\w+)", " ".join(config.getini("addopts"))))
    kept, left_out, kinds, covered = [], [], set(), {"slow"}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()} & slow_marks
        smoke = item.get_closest_marker("smoke") is not None
        (kept if not marks or smoke or schedule.shard(item.nodeid) == int(chosen) else left_out).append(item)
        kinds |= marks
        covered |= marks if smoke else set()
    if kinds - covered:
        raise pytest.UsageError(f"no test is marked both `smoke` and: {', '.join(sorted(kinds - covered))}")
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Give each pytest process a folder at a time, so that no server and no ranks are started twice."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFolder(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return schedule.group(nodeid)

    return ByFolder(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function in an event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


def pytest_collection_finish() -> None:
    """Exclude thousands of collected tests and their modules from later garbage collections."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """Yield a function f(size) that returns `size` ranks with Megatron-core. All tests share the ranks."""
    with ExitStack() as started:
        yield functools.cache(lambda size: started.enter_context(Ranks(size)))


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Return a function f(name, body) that writes the shell script `name`, found before all other programs."""
    (directory := tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(directory), prepend=":")

    def write(name: str, body: str) -> Path:
        (directory / name).write_text(f"#!/bin/sh\n{body}\n")
        (directory / name).chmod(0o755)
        return directory / name

    return write
