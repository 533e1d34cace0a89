"""A micro-batch as the model reads it: packing, context parallelism, routing replay."""
