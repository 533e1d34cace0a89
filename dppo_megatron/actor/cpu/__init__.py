"""What stands in for CUDA and TransformerEngine where they are absent: plain torch layers, names Megatron expects."""
