"""Starts, watches, restarts and ends the processes of a run: the driver (here and on Slurm), a run on this machine."""
