"""Track a run's engines: registry, health, and the policy version of each. `run.launch.driver` starts and restarts."""
