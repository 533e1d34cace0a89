"""Tiny models of every family, and the command line in this process."""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.model_directories import write_model
from tests.support.models import CONFIGS


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """One bf16 model directory per family, and one of experts in every layer; no weight is at its neutral value."""
    root = tmp_path_factory.mktemp("models")
    for family in CONFIGS:
        write_model(root / family, CONFIGS[family])
    write_model(root / "all_experts", {**CONFIGS["qwen3_moe"], "mlp_only_layers": []})
    return root


@pytest.fixture
def convert(monkeypatch) -> Callable[..., str]:
    """Runs `dppo-megatron convert ...` in this process; returns its output and raises its errors."""
    from dppo_megatron.cli import app

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: object) -> str:
        result = CliRunner().invoke(app, ["convert", *map(str, arguments)])
        if result.exception is not None:
            raise result.exception
        return result.output

    return run
