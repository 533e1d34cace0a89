"""Whole runs on real parts: a random policy of 0.8 M parameters, Megatron-core ranks over gloo, a real vLLM server."""

from pathlib import Path

import pytest

from tests.support.runs import Engine, start_engine, write_task


@pytest.fixture(scope="session")
def task(tmp_path_factory) -> Path:
    """The quickstart's task with a held-out set small enough for tests."""
    return write_task(tmp_path_factory.mktemp("task"), heldout=16)


@pytest.fixture(scope="session")
def engine(task, tmp_path_factory) -> Engine:
    """One vLLM server that several runs share, as engines outside a run do."""
    server = start_engine(task, tmp_path_factory.mktemp("engine"))
    yield server
    server.end()
