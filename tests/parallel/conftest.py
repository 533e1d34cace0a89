"""Models, their banks, and every case once on ranks of its world size."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parallel.cases import CASES, write_bank
from tests.parallel.scenarios import train
from tests.support.actor_cases import make_models
from tests.support.actor_ranks import run_scenario


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("parallel") / "models"
    families = ("qwen3", "qwen3_moe", "deepseek", "mistral", "glm_flash", "tied")
    make_models(root, *families, glm="glm4_moe", delta="qwen3_5", delta_moe="qwen3_5_moe")
    for model in root.iterdir():
        write_bank(root.parent / "banks" / model.name, model)
    write_bank(root.parent / "banks" / "qwen3+kept", root / "qwen3", truncated=True)
    return root


@pytest.fixture(scope="session")
def trained(ranks, models, tmp_path_factory) -> Callable[[str], dict]:
    """f(case) -> its result; each case is run once."""
    root = tmp_path_factory.mktemp("parity")

    @functools.cache
    def result(case: str) -> dict:
        size = next(size for size, cases in CASES.items() if case in cases)
        return run_scenario(ranks(size), train, models, root / case.replace(":", "-"), case)

    return result
