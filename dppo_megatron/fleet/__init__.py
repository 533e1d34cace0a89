"""All engines of a run together: which are registered, which are healthy, which hold the weights of which version."""
