"""From a config to processes: checks, plan, local and Slurm launchers."""
