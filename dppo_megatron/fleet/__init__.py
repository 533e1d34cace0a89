"""Track all engines of a run: their registry, their health, and the policy version that each serves."""
