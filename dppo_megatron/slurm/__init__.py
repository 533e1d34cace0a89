"""Runs inside Slurm allocations: submitting a job, driving its steps, and the task of each step."""
