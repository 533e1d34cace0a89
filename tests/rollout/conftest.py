"""One tiny model pair and one real engine for all tests that need them."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory) -> tuple[Path, Path]:
    """Directories of models A and B: one architecture, two sets of random weights."""
    from tiny_engine import make_model

    root = tmp_path_factory.mktemp("models")
    return make_model(root / "a", seed=1), make_model(root / "b", seed=2)


@pytest.fixture(scope="session")
def tiny_server_log(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("server") / "server.log"


@pytest.fixture(scope="session")
def tiny_server(tiny_models, tiny_server_log):
    """(config, url) of a vLLM server that serves model A as policy 0."""
    pytest.importorskip("vllm", reason="needs vLLM")
    from tiny_engine import engine_config, running_server

    config = engine_config(tiny_models[0])
    with running_server(config, tiny_server_log, version=0) as url:
        yield config, url
