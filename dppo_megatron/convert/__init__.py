"""Converts weights between Hugging Face directories and Megatron checkpoints, by the one weight map in `hf`."""
