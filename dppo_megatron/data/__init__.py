"""Prompts, tokenizers, packing. Import the modules: `packing` alone needs torch, `tokenizer` transformers."""
