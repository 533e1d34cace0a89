"""Rules of `data`: a tokenizer that suits the model, and prompt files whose every row can be read, is short, and has an
answer that the rewards can compare with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dppo_megatron.config import Config

if TYPE_CHECKING:
    from dppo_megatron.data.prompts import PromptFile
    from dppo_megatron.hf import HFModelConfig


def problems(config: Config, hf: HFModelConfig | None, notes: list[str]) -> list[str]:
    """Reads and tokenizes every file. Adds to `notes` how many prompts each has."""
    from dppo_megatron.data.prompts import PromptFile
    from dppo_megatron.data.tokenizer import TokenizerError, load_tokenizer

    out, tokenizer = [], None
    try:
        tokenizer = load_tokenizer(config.model.path)
    except TokenizerError as error:
        if hf is not None:  # else the model's own problem is reported
            out.append(str(error))
    (train, _), *more = config.data.train_files
    named = [("data.train", train), *((f"data.more.{number}.path", path) for number, (path, _) in enumerate(more))]
    if config.data.eval is not None:
        named.append(("data.eval", config.data.eval))
    files: list[PromptFile] = []
    for setting, path in named:
        if not path.exists() and "*" not in path.name:
            out.append(f"{setting} = {path}: no such file; it must hold one JSON object a line, or be a table")
        elif tokenizer is not None:
            try:
                files.append(PromptFile(path, tokenizer, config.data))
            except ValueError as error:
                out.append(str(error))
            else:
                notes.append(f"{setting}: {files[-1].describe()}")
    return out + _answer_problems(config, files)


def _answer_problems(config: Config, files: Sequence[PromptFile]) -> list[str]:
    """Rows that no response could be scored for."""
    from dppo_megatron.rewards import RewardError, RewardPool

    if not config.samples:
        return []
    out = []
    try:
        with RewardPool(config.reward) as rewards:
            for file in files:
                found = rewards.check_answers([(row.source, row.answer) for row in file.rows])
                violations = [(row.number, why) for row, why in zip(file.rows, found, strict=True) if why]
                if violations:
                    out.append(str(file.error(violations)))
    except RewardError:
        return []  # `reward` says so
    return out
