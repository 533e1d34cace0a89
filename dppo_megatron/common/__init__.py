"""What every room needs: number formats, GPUs by name, files, processes, ranks, retries."""
