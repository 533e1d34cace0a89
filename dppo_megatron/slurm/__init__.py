"""Runs inside Slurm allocations: submits a job, drives its steps, and runs the task of each step."""
