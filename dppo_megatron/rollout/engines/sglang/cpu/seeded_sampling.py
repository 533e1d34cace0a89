"""Implement the hash function for SGLang's seeded sampling, because the native CPU kernel has no published build.

SGLang draws the token at position p of a request with seed s from Gumbel noise made of murmur3(s, p, token). On a CPU
it asks `torch.ops.sgl_kernel.murmur_hash32_cpu` for the hashes. This module defines that operator in plain torch.
"""

import torch

LOW = 0xFFFFFFFF


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return [n, m] int64 in [0, 2**32): the 32-bit MurmurHash3 of the 16 bytes seed (8), position (4), column (4).

    `seed` [n] uint64, `positions` [n] and `columns` [m] integers.
    """
    seed, positions, columns = (x.to(torch.int64) for x in (seed, positions, columns))
    state = torch.zeros_like(seed)
    for block in (seed & LOW, (seed >> 32) & LOW, positions & LOW):
        state = _mix(state, block)
    state = _mix(state[:, None], columns[None] & LOW) ^ 16
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & LOW
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & LOW
    return state ^ (state >> 16)


def _mix(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    # Products wrap modulo 2**64; their low 32 bits stay correct.
    block = (_rotate_left((block * 0xCC9E2D51) & LOW, 15) * 0x1B873593) & LOW
    return (_rotate_left(state ^ block, 13) * 5 + 0xE6546B64) & LOW


def _rotate_left(x: torch.Tensor, bits: int) -> torch.Tensor:
    return ((x << bits) | (x >> (32 - bits))) & LOW


def register() -> torch.library.Library:
    """Define the operator, and return the library that keeps it alive."""
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
    library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
    return library
