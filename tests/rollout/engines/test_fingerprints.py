"""Fingerprints of real engines equal those of the loaded weights.

Exchanged parts, which have other fingerprints, are in tests/weights/test_fingerprint.py, and parts that an engine kept
of the version before in tests/train/weight_sync/test_stale_engines.py.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file

from dppo_megatron.weights.fingerprint import Fingerprint, add, differing


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


def fingerprint(weights: dict[str, torch.Tensor]) -> Fingerprint:
    sent: Fingerprint = {}
    for name, tensor in weights.items():
        add(sent, name, tensor)
    return sent


def test_an_engine_holds_the_weights_that_it_loaded(served):
    async def load_all(engine):
        for version, path in enumerate((served.models["b"], served.models["a"]), 1):
            await engine.load_weights(path, version, "abort")
            assert differing(fingerprint(weights_of(path)), await engine.weights_fingerprint()) == []

    served.use(load_all)
