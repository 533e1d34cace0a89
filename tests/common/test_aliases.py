"""Names from before the groups lead to the same modules."""

import importlib
import pickle
import sys
from pathlib import Path

import pytest

import dppo_megatron
from dppo_megatron.aliases import GROUPS
from dppo_megatron.rollout.environments import Environment

PACKAGE = Path(dppo_megatron.__file__).parent


def test_the_table_has_every_room_of_a_group():
    for group, rooms in GROUPS.items():
        assert {file.parent.name for file in (PACKAGE / group).glob("*/__init__.py")} == set(rooms)


@pytest.mark.parametrize(
    ("name", "moved"),
    [
        ("rewards", "rollout.rewards"),
        ("rewards.gsm8k", "rollout.rewards.gsm8k"),
        ("environments.adapters.gym", "rollout.environments.adapters.gym"),
        ("doctor.steps", "report.doctor.steps"),
        ("observability", "report"),
        ("observability.names", "report.names"),
        ("slurm.script", "run.slurm.script"),
    ],
)
def test_both_names_are_one_module(name, moved):
    module = importlib.import_module(f"dppo_megatron.{name}")
    assert module is importlib.import_module(f"dppo_megatron.{moved}")
    assert module.__name__ == module.__spec__.name == f"dppo_megatron.{moved}"


def test_imports_by_the_earlier_name_find_the_same_class():
    from dppo_megatron.environments.interface import Environment as earlier

    from dppo_megatron import environments

    assert earlier is Environment is environments.Environment


def test_a_pickle_with_the_earlier_name_is_read():
    pickled = pickle.dumps(Environment, protocol=0)
    assert pickle.loads(pickled.replace(b".rollout.environments", b".environments")) is Environment


def test_a_missing_module_is_missing_by_both_names():
    with pytest.raises(ModuleNotFoundError, match=r"dppo_megatron\.rewards\.attic"):
        importlib.import_module("dppo_megatron.rewards.attic")
    assert "dppo_megatron.rewards.attic" not in sys.modules
