"""Converts a batch to the form that the model reads: packing, context parallelism, routing replay."""
