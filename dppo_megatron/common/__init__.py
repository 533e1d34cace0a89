"""Provide the common parts of all folders: number formats, GPUs by name, files, processes, ranks, retries."""
