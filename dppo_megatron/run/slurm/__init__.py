"""Runs inside Slurm allocations: submits a job, drives the job steps, and runs the task in each step."""
