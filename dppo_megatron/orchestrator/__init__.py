"""From prompts to finished groups in the bank: sampling under a staleness bound, rewards, evaluation."""
