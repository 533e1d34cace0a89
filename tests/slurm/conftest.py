"""One Slurm for all tests of this directory, and the task they train on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.runs import write_task
from tests.support.slurm.lab import Lab, why_not


@pytest.fixture(scope="session")
def lab(tmp_path_factory) -> Lab:
    if reason := why_not():
        pytest.skip(reason)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a suite that is ended ends its Slurm, too
    lab = Lab(tmp_path_factory.mktemp("slurm") / "lab")
    yield lab
    lab.close()


@pytest.fixture(scope="session")
def task(tmp_path_factory) -> Path:
    """The quickstart's task with a held-out set small enough for tests."""
    return write_task(tmp_path_factory.mktemp("task"), heldout=8)  # fewer than the reward holds back
