"""Runs inside Slurm allocations: what asks for one, what drives the job steps in it, and what each step's task does."""
