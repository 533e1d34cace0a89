"""Fill the bank with groups that are sampled under a staleness bound and scored, and run evaluations."""
