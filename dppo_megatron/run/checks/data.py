"""Checks `data`: a tokenizer must load, and every row of the prompt files must be usable.

A usable row can be read, is short enough, and has an answer that the rewards can compare with.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dppo_megatron.config import Config

from . import distillation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dppo_megatron.config.task import RewardConfig
    from dppo_megatron.data.prompts import PromptFile
    from dppo_megatron.hf import HFModelConfig


def problems(
    config: Config, hf: HFModelConfig | None, notes: list[str], absent: list[str], tools: Sequence[dict[str, Any]] = ()
) -> list[str]:
    """Read and tokenize every file. Add a description of each file to `notes`, and missing files to `absent`.

    `tools` are the environment's tools, which the chat template writes into every prompt.
    """
    from dppo_megatron.data.prompts import PromptFile, PromptFileError, answer_end
    from dppo_megatron.data.rows import column
    from dppo_megatron.data.tokenizer import TOKENIZER_FILES, TokenizerError, load_tokenizer

    out: list[str] = []
    tokenizer = None
    try:
        tokenizer = load_tokenizer(config.model.path)
    except TokenizerError as error:
        if hf is not None:  # otherwise the model's problem is reported
            has_tokenizer = any((config.model.path / name).exists() for name in TOKENIZER_FILES)
            (out if has_tokenizer else absent).append(str(error))
    if hf is not None and tokenizer is not None and len(tokenizer) < 0.8 * hf.vocab_size:
        size = f"the tokenizer has {len(tokenizer)} tokens and the model {hf.vocab_size} rows"
        notes.append(f"warning: model.path = {config.model.path}: {size}; check that they belong together")
    end = None  # end token of answers that an objective learns
    if tokenizer is not None and config.objective.supervised:
        try:
            end = answer_end(config, tokenizer)
        except ValueError as error:
            out.append(str(error))
    if config.rollout.bank is not None:
        out += _bank_problems(config.rollout.bank, config.model.path, absent)
    (train, _), *extra = config.data.train_files
    named = [("data.train", train), *((f"data.more.{number}.path", path) for number, (path, _) in enumerate(extra))]
    graded = [(setting, path, config.data, config.reward) for setting, path in named]
    for name, eval_set in config.eval_sets.items():
        setting = f"eval.sets.{name}.path" if name in config.eval.sets else "data.eval"
        graded.append((setting, eval_set.path, config.data_of(eval_set), eval_set.reward or config.reward))
    files: list[tuple[PromptFile, RewardConfig]] = []
    trained: set[tuple[str, str]] = set()  # prompts with answers
    for setting, path, data, reward in graded:
        if not path.exists() and "*" not in str(path):
            hub = "" if path.suffix else "; one of the Hub: `hf download NAME --repo-type dataset --local-dir DIR`"
            absent.append(f"{setting} = {path}: no file {path.absolute()}; name JSON lines, parquet or a dataset{hub}")
        elif tokenizer is not None or not data.chat_template:
            try:
                file = PromptFile(path, tokenizer, data, tools)
            except PromptFileError as error:
                out.append(f"{setting} = {error}")
            except ValueError as error:
                out.append(str(error))
            else:
                files.append((file, reward))
                if hf is not None and tokenizer is not None and setting in dict(named):
                    long = list(_long_rows(config, hf, tokenizer, end, file))
                    out += [f"{setting} = {file.error(long)}"] if long else []
                prompts = {(repr(column(r.columns, data.prompt_column, "")), r.answer) for r in file.rows}
                if setting in dict(named):
                    trained |= prompts
                elif prompts <= trained and config.environment.source is None:
                    out.append(f"{setting} = {path}: the run trains on all of its rows; name rows that it does not")
                section, sources = config.distillation, {row.source for row in file.rows}
                if section.teachers and setting in dict(named) and None in map(section.teacher_of, sources):
                    out.append(f"distillation.teachers: {setting} has rows of sources without one; name one for each")
                notes.append(f"{setting}: {file.describe()}")
                batch, total = config.rollout.prompts_per_step, len(file.rows)
                if setting == "data.train" and not extra and batch > total:
                    times = f"{batch / total:.3g} times"
                    notes.append(f"rollout.prompts_per_step = {batch}: a step uses the {total} prompts {times}")
    return out + _answer_problems(config, files, notes)


def _bank_problems(bank: Path, model: Path, absent: list[str]) -> list[str]:
    """Return why stored groups cannot train the model, judged by the first. Add a missing directory to `absent`."""
    from dppo_megatron.bank import BankError, BankReader
    from dppo_megatron.bank.files import HEAD_NAME
    from dppo_megatron.data.tokenizer_file import TokenizerFile

    if not bank.is_dir():
        absent.append(f"rollout.bank = {bank}: no such directory; name the bank of a run, RUN/bank")
    elif not any(bank.iterdir()):
        return []  # filled later
    elif not (bank / HEAD_NAME).exists():
        return [f"rollout.bank = {bank}: not a bank, because it has no {HEAD_NAME}; name RUN/bank"]
    elif tokenizer := TokenizerFile.load(model):
        try:
            reader = BankReader(bank)
            for entry in reader.entries(0, min(1, reader.refresh())):
                group = reader.read(entry, parts=("core",))
                if mismatch := tokenizer.mismatch(group, truncated=True):  # perhaps truncated by the run that sampled
                    end = "name the model whose tokenizer wrote the bank"
                    return [f"rollout.bank = {bank}: prompt {entry.position}: model.path's tokenizer {mismatch}; {end}"]
        except BankError as error:
            return [f"rollout.bank = {bank}: {error}"]
    return []


def _long_rows(
    config: Config, hf: HFModelConfig, tokenizer: PreTrainedTokenizerBase, end: int | None, file: PromptFile
) -> Iterator[tuple[int, str]]:
    """Yield (number, problem) of rows too long for the model or their teacher. end: token that ends answers."""
    from dppo_megatron.data.prompts import answer_ids

    if end is not None:
        for row in file.rows:
            length = len(answer_ids(tokenizer, row.answer, end))
            if problem := config.too_long(hf.max_position_embeddings, len(row.token_ids), length):
                yield row.number, f"{problem}; raise the limit, or remove it"
    yield from distillation.long_prompts(config, file.rows, tokenizer)


def _answer_problems(config: Config, files: Sequence[tuple[PromptFile, RewardConfig]], notes: list[str]) -> list[str]:
    """Return rows with answers that no reward can read, and rewards that cannot score any row.

    Adds to `notes` rewards that raise for the first row of a source. Skipped with an environment, which may compute
    rewards itself.
    """
    from dppo_megatron.rollout.rewards import RewardError, RewardPool
    from dppo_megatron.rollout.rewards.outcome import UNFIT
    from dppo_megatron.types import Prompt

    if not config.samples or config.environment.source is not None:
        return []
    out = []
    for reward, group in itertools.groupby(files, lambda entry: entry[1]):
        graded = list(group)
        try:
            with RewardPool(reward) as rewards:
                for file, _ in graded:
                    errors = rewards.check_answers([(row.source, row.answer) for row in file.rows])
                    violations = [(row.number, error) for row, error in zip(file.rows, errors, strict=True) if error]
                    if violations:
                        out.append(str(file.error(violations)))
                firsts = {row.source: row for file, _ in reversed(graded) for row in reversed(file.rows)}.values()
                prompts = [Prompt(0, r.number - 1, r.token_ids, r.text, r.answer, r.columns, r.source) for r in firsts]
                for name, failure in rewards.try_once(prompts):
                    line = f"reward.name = {name}: called with row 1's prompt and answer: {failure.detail}"
                    if UNFIT in line:
                        out.append(line)
                    else:
                        notes.append(f"warning: samples whose reward raises are not trained on; {line}")
        except RewardError:
            continue  # `reward_problems` reports it
    return out
