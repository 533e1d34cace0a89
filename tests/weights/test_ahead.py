"""What is read before an engine pauses: the same bits, within a budget, and damage found before."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dppo_megatron.weights.ahead import Ahead
from dppo_megatron.weights.delta import DamagedDelta, Version
from tests.weights.test_delta import stored

NAMES = ["model.embed_tokens.weight", *(f"model.layers.{n}.mlp.up_proj.weight" for n in range(8)), "model.norm.weight"]
CHANGED = ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"]


@pytest.fixture
def directories(tmp_path) -> list[Path]:
    """A model, a delta that changes all of it, and one that changes `CHANGED`."""
    torch.manual_seed(0)
    model = {name: torch.randn(50, 20).bfloat16() for name in NAMES}
    (tmp_path / "v0").mkdir()
    save_file(model, tmp_path / "v0" / "model.safetensors")
    every = {name: tensor.clone() for name, tensor in model.items()}
    for tensor in every.values():
        tensor[3, 4] += 1
    some = {name: tensor + 1 if name in CHANGED else tensor for name, tensor in every.items()}
    stored(tmp_path / "v1", tmp_path / "v0", every)
    stored(tmp_path / "v2", tmp_path / "v1", some)
    return [tmp_path / f"v{number}" for number in range(3)]


def waited(ahead: Ahead) -> Ahead:
    deadline = time.monotonic() + 10
    while not ahead.finished():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return ahead


def same(ahead: Ahead, directory: Path) -> bool:
    expected = dict(Version(directory).tensors())
    read = dict(ahead.tensors())
    return list(read) == list(expected) and all(torch.equal(tensor, read[name]) for name, tensor in expected.items())


@pytest.mark.parametrize("budget", [0, 1, 5000, 1 << 30])
def test_no_more_is_kept_than_the_budget_and_one_tensor(directories, budget):
    ahead = waited(Ahead(Version(directories[2]), budget))
    kept = sum(tensor.nbytes for tensor in ahead._kept.values())
    assert min(budget, 2000 * len(NAMES)) <= kept < budget + 2000
    assert same(ahead, directories[2])
    assert not ahead._kept, "let go as it is taken"
    assert same(ahead, directories[2]), "again, as by a server that tries twice"


def test_what_is_as_in_the_model_is_not_kept(directories, tmp_path):
    model = dict(Version(directories[0]).tensors())
    stored(tmp_path / "v3", directories[0], {name: tensor + (name in CHANGED) for name, tensor in model.items()})
    ahead = waited(Ahead(Version(tmp_path / "v3"), 1 << 30))
    assert sorted(ahead._kept) == sorted(CHANGED), "the others are mapped files"
    assert same(ahead, tmp_path / "v3")


def test_damage_is_found_before_the_pause(directories):
    version = Version(directories[2])
    file = directories[2] / "part.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    ahead = Ahead(version, 1 << 30)
    with pytest.raises(DamagedDelta):
        waited(ahead)
    with pytest.raises(DamagedDelta):
        next(ahead.tensors())


def test_one_that_nobody_takes_keeps_nothing(directories):
    ahead = Ahead(Version(directories[2]), 1 << 30)
    ahead.drop()
    assert not ahead._kept
