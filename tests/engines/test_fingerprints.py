"""Fingerprints of real engines equal those of the loaded weights, and differ where parts are exchanged.

Parts that an engine kept of the version before are in tests/weight_sync/test_stale_engines.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dppo_megatron.weights.fingerprint import Fingerprint, add, differing, group_of

pytestmark = pytest.mark.timeout(300)


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


def fingerprint(weights: dict[str, torch.Tensor]) -> Fingerprint:
    sent: Fingerprint = {}
    for name, tensor in weights.items():
        add(sent, name, tensor)
    return sent


@pytest.fixture
def directory(served, tmp_path):
    """f(weights) -> a model directory with these weights."""

    def make(weights: dict[str, torch.Tensor]) -> Path:
        path = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(served.models["a"], path, ignore=shutil.ignore_patterns("*.safetensors"))
        save_file(weights, path / "model.safetensors", {"format": "pt"})
        return path

    return make


def held_after(served, *directories: Path) -> list[Fingerprint]:
    async def load_all(engine):
        held = []
        for version, path in enumerate(directories, 1):
            await engine.load_weights(path, version, "abort")
            held.append(await engine.weights_fingerprint())
        return held

    return served.use(load_all)


def test_an_engine_holds_what_it_loaded(served):
    a, b = served.models["a"], served.models["b"]
    for path, held in zip((b, a), held_after(served, b, a), strict=True):
        assert differing(fingerprint(weights_of(path)), held) == []


def test_exchanged_parts_rows_and_columns_are_named(served, directory):
    """Each layer exchanges other parts with the same bits: gate and up, k and v, rows of q, columns of o."""
    sent = weights_of(served.models["a"])
    held = dict(sent)
    for name, tensor in sent.items():
        for layer, part, other in ((0, "gate_proj", "up_proj"), (1, "k_proj", "v_proj")):
            if f".layers.{layer}." in name and part in name:
                held[name], held[name.replace(part, other)] = sent[name.replace(part, other)], tensor
        if ".layers.2." in name and "q_proj.weight" in name:
            held[name] = tensor.flip(0).contiguous()
        if ".layers.3." in name and "o_proj.weight" in name:
            held[name] = tensor.roll(tensor.shape[1] // 2, 1)
    changed = {group_of(name) for name in sent if not torch.equal(held[name], sent[name])}
    assert len(changed) >= 4
    (found,) = held_after(served, directory(held))
    assert set(differing(fingerprint(sent), found)) == changed
    assert differing(fingerprint(held), found) == []
