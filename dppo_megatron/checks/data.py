"""Rules of `data`: a tokenizer that suits the model, and prompt files of which every line can be read and is short."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dppo_megatron.config import Config

if TYPE_CHECKING:
    from dppo_megatron.hf import HFModelConfig


def problems(config: Config, hf: HFModelConfig | None, notes: list[str]) -> list[str]:
    """Reads and tokenizes both files. Adds to `notes` how many prompts each has."""
    from dppo_megatron.data.prompts import PromptSource
    from dppo_megatron.data.tokenizer import TokenizerError, load_tokenizer

    out, tokenizer = [], None
    try:
        tokenizer = load_tokenizer(config.model.path)
    except TokenizerError as error:
        if hf is not None:  # else the model's own problem is reported
            out.append(str(error))
    for name in ("train", "eval"):
        path = getattr(config.data, name)
        if path is None:
            continue
        if not path.is_file():
            out.append(f"data.{name} = {path}: no such file; it must hold one JSON object a line")
        elif tokenizer is not None:
            try:
                prompts = len(PromptSource(path, tokenizer, config.data, config.run.seed))
            except ValueError as error:
                out.append(str(error))
            else:
                notes.append(f"data.{name}: {prompts} prompts from {path}")
    return out
