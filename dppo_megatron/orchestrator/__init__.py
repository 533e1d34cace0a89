"""Fill the bank with groups that are sampled from prompts under a staleness bound, score them, and run evaluations."""
