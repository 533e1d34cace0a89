"""Fingerprints must change when tensors of Qwen3.5's gated delta net are exchanged.

Run from a clone's root: PYTHONPATH=. python tests/reproducers/fingerprint_delta_net.py
"""

import sys

import torch

from dppo_megatron.weights.fingerprint import _salt, add, part_of

torch.manual_seed(0)
heads, hidden = 32, 2048
a, b = (torch.randn(heads, hidden, dtype=torch.bfloat16) for _ in range(2))
logs, bias = (torch.randn(heads) for _ in range(2))
cases = {
    ("linear_attn.in_proj_a.weight", "linear_attn.in_proj_b.weight"): (a, b),
    ("linear_attn.A_log", "linear_attn.dt_bias"): (logs, bias),
    ("mlp.gate_proj.weight", "mlp.up_proj.weight"): (a, b),
}


def sums(names, tensors):
    found = {}
    for name, tensor in zip(names, tensors, strict=True):
        add(found, f"model.layers.0.{name}", tensor)
    return found


blind = [names for names, tensors in cases.items() if sums(names, tensors) == sums(names, tensors[::-1])]
for names in cases:
    print(f"{' <-> '.join(names)}: {'NOT DETECTED' if names in blind else 'detected'}")
projections = ["in_proj_a", "in_proj_b", "in_proj_z", "in_proj_qkv"]
print("salts of", projections, "are equal:", len({_salt(name) for name in projections}) == 1)
print("parts of A_log and dt_bias:", *(part_of(f"model.layers.0.linear_attn.{name}") for name in ("A_log", "dt_bias")))
sys.exit(bool(blind))
