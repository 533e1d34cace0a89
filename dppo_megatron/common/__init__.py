"""Common parts of all rooms: number formats, GPUs by name, files, processes, ranks, retries."""
