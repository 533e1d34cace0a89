"""Fill the bank with finished groups from prompts: sampling under a staleness bound, rewards, evaluation."""
