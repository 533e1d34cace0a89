"""Track a run's engines: the registry, engine health, and the policy version that each engine serves."""
