"""Every process that a test starts finds this repository, `tests` included, before anything else."""

from __future__ import annotations

import functools
import gc
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.ranks import Ranks

ROOT = Path(__file__).parents[1]
PATHS = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(PATHS))


# Folders whose files start what others of the folder do not use.
BY_FILE = ("e2e", "parallel", "attack", "engines", "weight_sync", "null_gpu")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Of two processes of pytest each takes a folder at a time, so that no server and no ranks are started twice."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFolder(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    return ByFolder(config, log)


def pytest_collection_finish() -> None:
    """Leave thousands of collected tests and their modules out of later garbage collections."""
    gc.collect()
    gc.freeze()


def group(nodeid: str) -> str:
    """Tests of one group run in one process: those of a folder or file, of the engines' contract those of a server.

    The faults of SGLang's server use no server of the other faults.
    """
    file, _, test = nodeid.partition("::")
    _, folder, *_ = file.split("/")
    if folder == "engines" and (server := re.search(r"(vllm|sglang)-(dense|moe)", test)):
        return server[0]
    if folder == "faults" and "sglang" in nodeid:
        return "faults sglang"
    return file if folder in BY_FILE else folder


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """f(size) -> that many ranks with Megatron-core, shared by all tests."""
    with ExitStack() as started:
        yield functools.cache(lambda size: started.enter_context(Ranks(size)))


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """f(name, body) -> a shell script of that name, found before all other programs."""
    (directory := tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(directory), prepend=":")

    def write(name: str, body: str) -> Path:
        (directory / name).write_text(f"#!/bin/sh\n{body}\n")
        (directory / name).chmod(0o755)
        return directory / name

    return write
