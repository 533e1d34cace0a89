"""Two real engines that outlive the runs, and one undisturbed run, which every disturbed one must equal."""

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
    return without_faults(task, engines, tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture(scope="session")
def undisturbed_slowly(task, engines, tmp_path_factory) -> Path:
    """The run directory of one with steps that change few bits."""
    from tests.support.faults import SLOWLY

    return without_faults(task, engines, tmp_path_factory.mktemp("slowly"), optimizer=SLOWLY)


def without_faults(task: Path, engines, directory: Path, **sections: dict) -> Path:
    from tests.support.faults import fault_config
    from tests.support.runs import run, write_config

    tree = fault_config(task, directory / "run", urls=[engine.url for engine in engines]) | sections
    run("train", write_config(tree, directory / "c.yaml"))
    return directory / "run"


@pytest.fixture
def start_run(task, tmp_path):
    """Starts a run in the background; it ends with the test."""
    from tests.support.faults import Run, fault_config

    runs = []

    def start(*, urls=(), optimizer=None, weight_sync=None, **engine) -> Run:
        tree = fault_config(task, tmp_path / "run", urls=list(urls), **engine)
        tree |= {"weight_sync": weight_sync or {}} | ({"optimizer": optimizer} if optimizer else {})
        runs.append(Run(tree, tmp_path))
        return runs[-1]

    yield start
    for started in runs:
        started.end()
