"""Prompts, tokenizers, packing. Import the modules: only `packing` needs torch, `tokenizer` needs transformers."""
