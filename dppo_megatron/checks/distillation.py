"""Checks `distillation`: every row has one teacher, and a teacher reads the same tokens as the policy."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from dppo_megatron.config import Config
from dppo_megatron.config.distillation import DistillationConfig


def problems(config: Config) -> list[str]:
    chosen, out = config.distillation, []
    if not chosen.teachers:
        if chosen != DistillationConfig():
            out.append(
                "distillation.teachers = {}: without one the section has no effect; name one, or remove the others"
            )
        return out
    if not config.samples:
        return [
            f"distillation.teachers = {', '.join(chosen.teachers)}: nothing is sampled for them to score; the lists of "
            "a given rollout.bank are used without teachers; remove them"
        ]
    if config.rollout.temperature != 1:
        out.append(
            f"rollout.temperature = {config.rollout.temperature}: teachers score at temperature 1, so the policy would "
            "learn to imitate them only after a division of its logits; set it to 1"
        )
    if config.rollout.dynamic_sampling:
        out.append(
            "rollout.dynamic_sampling = true: drops groups of equal rewards, but distillation learns from them; set it "
            "to false"
        )
    claimed = Counter(source for teacher in chosen.teachers.values() for source in teacher.sources or ("",))
    for source, count in claimed.items():
        if count > 1:
            rows = f"rows of source {source}" if source else "rows of all other sources (sources is empty)"
            out.append(f"distillation.teachers: {count} of them claim {rows}; each row has one teacher")
    for name, teacher in chosen.teachers.items():
        setting, template = f"distillation.teachers.{name}", teacher.prompt_template
        if teacher.urls and teacher.path is not None:
            out.append(f"{setting}.path = {teacher.path}: urls name running servers instead; remove one of the two")
        if template is not None and "{prompt}" not in template:
            out.append(f"{setting}.prompt_template = {template!r}: must contain {{prompt}}")
        if template is not None and config.environment.source is not None:
            out.append(
                f"{setting}.prompt_template: an environment continues the policy's own prompt; remove one of the two"
            )
        if not teacher.urls and teacher.path is None and template is None:
            out.append(
                f"{setting}: without urls and path the policy is its own teacher, which with its own prompt agrees "
                "with itself; set one of them, or prompt_template"
            )
        if not teacher.urls and teacher.path is None and teacher.kind not in (None, config.engine.kind):
            out.append(f"{setting}.kind = {teacher.kind}: the engines are {config.engine.kind}; remove it")
        if not teacher.urls and teacher.path is None and chosen.topk > config.engine.max_logprobs:
            out.append(
                f"distillation.topk = {chosen.topk}: above the engines' cap engine.max_logprobs = "
                f"{config.engine.max_logprobs}; change one of them"
            )
    return out


def model_problems(config: Config) -> list[str]:
    """Return why a teacher that the run serves cannot be read, or has other tokens than the policy."""
    from dppo_megatron.data.tokenizer import TokenizerError, load_tokenizer
    from dppo_megatron.hf import ModelError, read_hf_config

    out = []
    for name, teacher in config.started_teachers.items():
        path, setting = teacher.path or Path(), f"distillation.teachers.{name}.path = {teacher.path}"
        try:
            model, own = read_hf_config(path), read_hf_config(config.model.path)
            same = load_tokenizer(path).get_vocab() == load_tokenizer(config.model.path).get_vocab()
        except (ModelError, TokenizerError) as error:
            out.append(f"{setting}: {error}")
            continue
        if not same or model.vocab_size < own.vocab_size:
            out.append(
                f"{setting}: its tokenizer or vocabulary of {model.vocab_size} differs from that of model.path, "
                f"{own.vocab_size}, so its log-probs would be of other tokens; use a teacher of the same family"
            )
        if config.distillation.topk > model.vocab_size:
            out.append(f"distillation.topk = {config.distillation.topk}: the model has {model.vocab_size} tokens")
    return out
