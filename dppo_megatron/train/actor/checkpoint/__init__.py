"""Saves and loads exact checkpoints: their contents, shared writing by data-parallel ranks, writing while training."""
