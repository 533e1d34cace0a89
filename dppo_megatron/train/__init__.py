"""From a group to new weights: the policy in Megatron-core, the training loop, and publishing."""
