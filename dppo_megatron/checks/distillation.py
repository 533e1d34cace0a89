"""Checks `distillation`: every row has one teacher, which reads the same tokens as the policy."""

from __future__ import annotations

from collections import Counter

from dppo_megatron.config import Config
from dppo_megatron.errors import ExpectedError


def problems(config: Config) -> list[str]:
    chosen, rollout, out = config.distillation, config.rollout, []
    wrong = {
        "nothing is sampled for them to score (a given bank has its lists); remove them": not config.samples,
        f"score at temperature 1; set rollout.temperature = {rollout.temperature:g} to that": rollout.temperature != 1,
        "rollout.dynamic_sampling drops groups that teach; set it to false": rollout.dynamic_sampling,
    }
    if chosen.teachers:
        out += [f"distillation.teachers = {', '.join(chosen.teachers)}: {why}" for why, holds in wrong.items() if holds]
    claimed = Counter(source for teacher in chosen.teachers.values() for source in teacher.sources or ("*",))
    if twice := [source for source, count in claimed.items() if count > 1]:
        out.append(f"distillation.teachers: several claim rows of source {', '.join(twice)}; name one for each")
    for name, teacher in chosen.teachers.items():
        template = teacher.prompt_template
        if (teacher.urls and teacher.path) or not (teacher.urls or teacher.path or template):
            out.append(
                f"distillation.teachers.{name}: set one of urls and path; without them the policy teaches itself, and "
                "needs a prompt_template"
            )
        if template is not None and ("{prompt}" not in template or config.environment.source is not None):
            why = "must contain {prompt}, and no environment can continue it; change or remove it"
            out.append(f"distillation.teachers.{name}.prompt_template = {template!r}: {why}")
    return out


def model_problems(config: Config) -> list[str]:
    """Return why a teacher that the run serves cannot be read, or has other tokens than the policy."""
    from dppo_megatron.data.tokenizer import load_tokenizer
    from dppo_megatron.hf import read_hf_config

    out = []
    for name, path in config.started_teachers.items():
        try:
            sizes = [read_hf_config(model).vocab_size for model in (path, config.model.path)]
            same = load_tokenizer(path).get_vocab() == load_tokenizer(config.model.path).get_vocab()
        except ExpectedError as error:
            out.append(f"distillation.teachers.{name}: {error}")
            continue
        if not same or sizes[0] < max(sizes[1], config.distillation.topk):
            out.append(
                f"distillation.teachers.{name}.path = {path}: has another tokenizer than model.path, or its {sizes[0]} "
                f"tokens are less than those, {sizes[1]}, or distillation.topk; use a teacher of the same family"
            )
    return out
