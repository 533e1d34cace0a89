"""Modules that need torch are imported at their first use, in every order of imports."""

import pkgutil
import subprocess
import sys

import pytest

from dppo_megatron import objectives


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr


def test_every_module_can_be_imported_first():
    names = [f"{objectives.__name__}.{module.name}" for module in pkgutil.iter_modules(objectives.__path__)]
    run(
        "import importlib, sys\n"
        f"for name in {names}:\n"
        "    importlib.import_module(name)\n"
        "    for loaded in [module for module in sys.modules if module.startswith('dppo_megatron')]:\n"
        "        del sys.modules[loaded]"
    )


def test_axes_and_presets_need_neither_torch_nor_pydantic():
    run(
        "import sys; sys.modules['torch'] = sys.modules['pydantic'] = None\n"
        "from dppo_megatron.objectives import AXES, PRESETS, ObjectiveSettings\n"
        "from dppo_megatron.objectives.settings import override\n"
        "assert override(PRESETS['ppo'].settings, {'epsilon': 0.1}).epsilon_high == 0.1"
    )


def test_names_that_are_not_there_are_refused_as_by_any_module():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = objectives.nothing
    with pytest.raises(ImportError):
        from dppo_megatron.objectives import neither  # noqa: F401
