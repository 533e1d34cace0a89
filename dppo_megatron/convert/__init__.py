"""Converts weights between Hugging Face directories and Megatron checkpoints with the weight map in `hf`."""
