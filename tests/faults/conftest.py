"""Two real engines that outlive the runs, and one run that nothing disturbs: what every disturbed one must equal."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def task(tmp_path_factory) -> Path:
    from tests.support.runs import write_task

    return write_task(tmp_path_factory.mktemp("task"), heldout=8)


@pytest.fixture(scope="session")
def engines(task, tmp_path_factory):
    """Two servers that no launcher restarts."""
    from tests.support.runs import start_engine

    directories = [tmp_path_factory.mktemp(f"engine-{i}") for i in range(2)]
    with ThreadPoolExecutor() as threads:  # they take long to start
        servers = list(threads.map(lambda directory: start_engine(task, directory), directories))
    yield servers
    for server in servers:
        server.end()


@pytest.fixture(scope="session")
def undisturbed(task, engines, tmp_path_factory) -> Path:
    """The run directory."""
    from tests.support.faults import fault_config
    from tests.support.runs import run, write_config

    directory = tmp_path_factory.mktemp("undisturbed")
    tree = fault_config(task, directory / "run", urls=[engine.url for engine in engines])
    run("train", write_config(tree, directory / "c.yaml"))
    return directory / "run"


@pytest.fixture
def start_run(task, tmp_path):
    """Starts a run in the background; it is ended, whatever became of it, with the test."""
    from tests.support.faults import Run, fault_config

    runs = []

    def start(*, urls=(), **engine) -> Run:
        runs.append(Run(fault_config(task, tmp_path / "run", urls=list(urls), **engine), tmp_path))
        return runs[-1]

    yield start
    for started in runs:
        started.end()
