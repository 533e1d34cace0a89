"""Provide code that all folders share: number formats, GPUs by name, files, processes, ranks, retries."""
