"""Run the training loop: wait for a batch, train on it, publish the weights, write checkpoints and logs."""
