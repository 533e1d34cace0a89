"""Exact checkpoints of a run: what they hold, how data-parallel ranks share writing them, writing while training."""
