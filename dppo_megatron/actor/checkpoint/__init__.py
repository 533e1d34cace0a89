"""Exact checkpoints of a run: their contents, shared writing by data-parallel ranks, writing while training."""
