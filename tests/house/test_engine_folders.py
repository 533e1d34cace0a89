"""An engine is a folder: only its own folder and the config schema know the name of a kind."""

import ast
from pathlib import Path
from typing import get_args

import pytest

from dppo_megatron.config.schema import EngineConfig
from dppo_megatron.rollout.engines.kinds import KINDS

ROOT = Path(__file__).parents[2]
ALLOWED = ("rollout/engines/", "config/engine.py")


def mentions(root: Path) -> list[str]:
    """Return strings equal to the name of a kind, and imports from its folder, in code outside of `ALLOWED`."""
    found = []
    for file in sorted((root / "dppo_megatron").rglob("*.py")):
        name = str(file.relative_to(root / "dppo_megatron"))
        if name.startswith(ALLOWED):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and node.value in KINDS:
                found.append(f"{name}:{node.lineno}: {node.value!r}")
            if isinstance(node, ast.ImportFrom) and set((node.module or "").split(".")) & set(KINDS):
                found.append(f"{name}:{node.lineno}: imports from {node.module}")
    return found


def test_only_the_folder_of_an_engine_knows_its_name():
    assert mentions(ROOT) == []


def test_every_kind_of_the_schema_has_a_folder():
    assert set(KINDS) == set(get_args(EngineConfig.model_fields["kind"].annotation))
    for name, kind in KINDS.items():
        assert type(kind).__module__ == f"dppo_megatron.rollout.engines.{name}.kind"


@pytest.mark.parametrize(
    "line",
    [
        'if config.engine.kind == "sglang":\n    pass',
        'x = {"vllm": 1}[config.engine.kind]',
        'x = config.engine.kind in ("sglang",)',
        "from dppo_megatron.rollout.engines.vllm.client import VllmEngine",
    ],
)
def test_a_decision_by_kind_elsewhere_is_found(tmp_path, line):
    for folder in ("rollout/fleet", "rollout/engines"):
        (tmp_path / "dppo_megatron" / folder).mkdir(parents=True)
        (tmp_path / "dppo_megatron" / folder / "fault.py").write_text(line)
    (found,) = mentions(tmp_path)
    assert found.startswith("rollout/fleet/fault.py:1: ")
