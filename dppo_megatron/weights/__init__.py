"""Handle policy weights on disk and in transfer; trainer and engines share the code. `hf.families` names tensors."""
