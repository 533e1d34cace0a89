"""Every exception of the package crosses a process: a pickle keeps its type, text and attributes."""

import ast
import builtins
import errno
import importlib
import pickle
from pathlib import Path

import pytest

from dppo_megatron.bank.errors import BankWriteError, write_error
from dppo_megatron.common.files import disk_full
from dppo_megatron.common.ranks import _error_of
from dppo_megatron.config import ConfigError
from dppo_megatron.data.rows import PromptFileError
from dppo_megatron.hf.errors import ModelError
from dppo_megatron.rollout.environments.interface import EnvironmentFailed

ROOT = Path(__file__).parents[2]
FULL = OSError(errno.ENOSPC, "No space left on device")
EXAMPLES = {  # of the classes with a constructor of their own
    BankWriteError: lambda: BankWriteError("cannot be written", errno.ENOSPC),
    ConfigError: lambda: ConfigError("config.yaml", ["train.steps = 0: too few; set 1", "run.dir: required, not set"]),
    EnvironmentFailed: lambda: EnvironmentFailed("timeout", "longer than 3 s"),
    ModelError: lambda: ModelError("model", ["no config.json", "no weights"]),
    PromptFileError: lambda: PromptFileError(Path("train.jsonl"), [(3, "no prompt"), (4, "no prompt")]),
}


def exception_names() -> list[str]:
    """Return `module:Class` of each exception class of the package, without importing it."""
    known = {name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, Exception)}
    files = {file: ast.parse(file.read_text()) for file in (ROOT / "dppo_megatron").rglob("*.py")}
    classes = [(file, node) for file, tree in files.items() for node in tree.body if isinstance(node, ast.ClassDef)]
    found: set[str] = set()
    while (
        more := {
            f"{'.'.join(file.relative_to(ROOT).with_suffix('').parts)}:{node.name}"
            for file, node in classes
            if known & {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        }
        - found
    ):
        found |= more
        known |= {name.rpartition(":")[2] for name in more}
    return sorted(found)


def same(error: BaseException) -> None:
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is type(error)
    assert (str(arrived), vars(arrived)) == (str(error), vars(error))


@pytest.mark.parametrize("name", exception_names())
def test_a_pickle_keeps_type_text_and_attributes(name):
    module, _, cls = name.partition(":")
    if ".extension." in module:
        pytest.importorskip("vllm")
    kind = getattr(importlib.import_module(module), cls)
    constructor = next(base for base in kind.__mro__ if "__init__" in vars(base))
    made = constructor.__module__.startswith("dppo_megatron.")
    error = EXAMPLES[constructor]() if made else kind("setting = value: why; remedy")
    assert type(error) is kind
    same(error)


def test_enumeration_covers_classes_of_every_base():
    names = {name.rpartition(":")[2] for name in exception_names()}
    assert {*(kind.__name__ for kind in EXAMPLES), "DiskFull", "Retriable", "BankTimeout", "StopRequested"} <= names


def test_a_full_disk_crosses_processes_with_its_number(tmp_path):
    for error in (disk_full(tmp_path / "weights.bin", FULL, 1000), write_error(tmp_path / "bank", FULL, 1000)):
        same(error)
        arrived = pickle.loads(pickle.dumps(error))
        assert arrived.errno == errno.ENOSPC
        assert "at least 1000 needed. Free space there" in str(arrived)


@pytest.mark.parametrize("kind", [ModelError, ConfigError, PromptFileError])
def test_the_error_of_another_rank_crosses_processes_too(kind):
    same(_error_of(kind, "rank 1: no weights"))
