"""Reinforcement learning for language models on Megatron-core with divergence trust regions (DPPO, DRPO)."""

from . import aliases as aliases

__version__ = "0.1.0"
