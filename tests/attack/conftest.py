"""Every failure names the seed that repeats it."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi import FastAPI

from dppo_megatron.rollout.engines.guard.asgi import ROOTS_VARIABLE, SECRET_VARIABLE

SECRET = "only this"


def pytest_report_header() -> str:
    environment = (f"{name}={os.environ.get(name, 'default')}" for name in ("ATTACK_SEED", "ATTACK_CASES"))
    return f"attack: {' '.join(environment)}"


class Engine:
    """A stand-in for vLLM's engine that records all calls."""

    def __init__(self, model: Path):
        self.model_config = SimpleNamespace(
            model=str(model), get_vocab_size=lambda: 64, max_logprobs=8, is_encoder_decoder=False
        )
        self.called: list[str] = []

    def __getattr__(self, name: str):
        def note(*_arguments, **_settings):
            self.called.append(name)
            raise AssertionError(f"the request reached the engine: {name}")

        return note


@pytest.fixture
def served(tmp_path, monkeypatch):
    """Our routes in the application that vLLM would serve, and its engine."""
    from dppo_megatron.rollout.engines.vllm.extension.routes import DppoRoutes
    from dppo_megatron.rollout.engines.vllm.extension.weights import WeightUpdater

    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    monkeypatch.setenv(ROOTS_VARIABLE, str(tmp_path / "run"))
    (tmp_path / "run" / "weights").mkdir(parents=True)
    app, routes = FastAPI(), DppoRoutes()

    @app.post("/v1/completions")
    @app.get("/health")
    async def theirs() -> dict:
        return {}

    routes.attach_router(app)
    routes._engine = Engine(tmp_path / "start")
    routes._updater = WeightUpdater(routes._engine, tmp_path / "start", 0)
    routes._experts = SimpleNamespace(available=False)
    return SimpleNamespace(app=app, engine=routes._engine, updater=routes._updater, run=tmp_path / "run")
