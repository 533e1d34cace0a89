"""Runs with stubs for their processes."""

import pytest

from tests.support.launched import launches


@pytest.fixture
def launch(tmp_path):
    with launches(tmp_path) as start:
        yield start
