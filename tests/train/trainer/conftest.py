"""The tiny task, which several files train on."""

from pathlib import Path

import pytest

from tests.support.tiny_task import make_task


@pytest.fixture(scope="session")
def task(tmp_path_factory) -> Path:
    return make_task(tmp_path_factory.mktemp("task"))
