"""The training loop: wait for a batch, train on it, publish the weights, checkpoint, report."""
