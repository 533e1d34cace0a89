"""Models, their banks, and one spawn for each world size whose results many tests read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.parallel.cases import CASES, write_bank
from tests.support.actor_cases import DEEPSEEK, QWEN3, QWEN3_MOE, set_expert_bias
from tests.support.actor_ranks import run_ranks


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    from dppo_megatron.hf import make_random_hf_model

    root = tmp_path_factory.mktemp("parallel") / "models"
    for name, config in {"qwen3": QWEN3, "qwen3_moe": QWEN3_MOE, "deepseek": DEEPSEEK}.items():
        make_random_hf_model(root / name, config, seed=1)
        set_expert_bias(root / name)
        write_bank(root.parent / "banks" / name, root / name)
    return root


@pytest.fixture(scope="session")
def ranks(models, request, tmp_path_factory):
    """f(case) -> its result, with one spawn for all collected cases of its world size."""
    wanted = {match[1] for item in request.session.items for match in re.finditer(r"\[(.+)\]", item.nodeid)}
    results: dict[int, dict] = {}

    def result(case: str) -> dict:
        world = next(size for size, cases in CASES.items() if case in cases)
        if world not in results:
            names = [name for name in CASES[world] if name in wanted or world == 1]
            directory = tmp_path_factory.mktemp(f"ranks{world}")
            results[world] = run_ranks(world, names, models, directory, "tests.parallel.scenarios")
        value = results[world][case]
        assert not isinstance(value, str), value
        return value

    return result
