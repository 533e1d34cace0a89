"""Writes, changes and compares small Hugging Face directories."""

import json
from collections.abc import Callable
from pathlib import Path

import torch

from dppo_megatron import hf


def write_model(directory: Path, config: dict, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a random model with different norms and biases, and a stand-in for a tokenizer."""
    hf.make_random_hf_model(directory, config, seed=3, dtype=dtype)
    generator = torch.Generator().manual_seed(4)

    def shake(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.dim() == 1 or name.endswith("bias"):
                shaken = tensor.float() + 0.2 * torch.randn(tensor.shape, generator=generator)
                tensors[name] = shaken if "e_score" in name else shaken.to(tensor.dtype)

    edit_weights(directory, shake)
    (directory / "tokenizer.json").write_text("{}")
    (directory / "generation_config.json").write_text(json.dumps({"do_sample": True}))
    return directory


def edit_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Rewrite the weights as one model.safetensors after `change(tensors)`."""
    source = hf.SafetensorsDirectory(directory)
    tensors = {name: source.tensor(name).clone() for name in source.tensors}
    change(tensors)
    writer = hf.PartWriter(directory, "x")
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    (part,) = writer.close()
    (directory / part.file).replace(directory / "model.safetensors")


def edit_config(directory: Path, **changes) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def same_weights(left: Path, right: Path) -> None:
    """Fail unless both HF directories have the same tensors, bit for bit."""
    a, b = hf.SafetensorsDirectory(left), hf.SafetensorsDirectory(right)
    assert set(a.tensors) == set(b.tensors)
    for name in a.tensors:
        assert a.tensor(name).dtype == b.tensor(name).dtype, name
        assert torch.equal(a.tensor(name), b.tensor(name)), name
