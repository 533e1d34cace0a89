"""Read prompts, load tokenizers, pack sequences.

Import the modules: only `packing` needs torch, `tokenizer` needs transformers.
"""
