"""Runs inside Slurm allocations: submitting a job, driving its steps, and what each step's task does."""
