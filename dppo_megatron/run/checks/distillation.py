"""Checks `distillation`: every row needs one teacher, with the policy's tokenizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dppo_megatron.config import Config, with_settings
from dppo_megatron.config.distillation import TeacherConfig
from dppo_megatron.errors import ExpectedError
from dppo_megatron.rollout.engines.teachers import teacher_config, trainer_teacher_config

from .model import on_any_machine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dppo_megatron.data.prompts import PromptRow


def problems(config: Config) -> Iterator[str]:
    distillation, rollout = config.distillation, config.rollout
    by_servers, temperature = config.servers_teach, rollout.temperature
    wrong = {
        "the run samples nothing that they could score; remove them": by_servers and not config.samples,
        f"score at temperature 1; set rollout.temperature ({temperature:g}) to 1": by_servers and temperature != 1,
        "rollout.dynamic_sampling would drop useful groups; set it to false": rollout.dynamic_sampling,
    }
    if distillation.teachers:
        named = f"distillation.teachers = {', '.join(distillation.teachers)}"
        yield from (f"{named}: {problem}" for problem, holds in wrong.items() if holds)
    claimed = Counter(source for teacher in distillation.teachers.values() for source in teacher.sources or ("*",))
    if twice := [source for source, count in claimed.items() if count > 1]:
        yield f"distillation.teachers: several claim rows of source {', '.join(twice)}; name one for each"
    for name, teacher in distillation.teachers.items():
        template = teacher.prompt_template
        if (teacher.urls and teacher.path) or not (teacher.urls or teacher.path or template):
            yield (
                f"distillation.teachers.{name}: set one of urls and path; without them the policy teaches itself, and "
                "needs a prompt_template"
            )
        only = TeacherConfig(path=teacher.path, in_trainer=True)
        if teacher.in_trainer and (teacher != only or len(distillation.teachers) > 1 or rollout.has_sampling_mask):
            yield (
                f"distillation.teachers.{name}.in_trainer = true: excludes other teachers, settings other than path, "
                "and a sampling mask (rollout.top_p, top_k, min_p); change these, or set it to false for a server"
            )
        if template is not None and ("{prompt}" not in template or config.environment.source is not None):
            reason = "must contain {prompt} and excludes environments; change or remove it"
            yield f"distillation.teachers.{name}.prompt_template = {template!r}: {reason}"


def long_prompts(
    config: Config, rows: Sequence[PromptRow], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[int, str]]:
    """Yield (number, problem) of rows that a teacher's `prompt_template` makes too long. Checks the 16 longest rows."""
    from dppo_megatron.rollout.orchestrator.teachers import teacher_prompt

    for name, teacher in config.distillation.teachers.items():
        template = "" if teacher.urls else teacher.prompt_template or ""
        examples = [row for row in rows if template and config.distillation.teacher_of(row.source) == name]
        for row in sorted(examples, key=lambda row: len(row.text) + len(row.answer) * template.count("{answer}"))[-16:]:
            room, ids = teacher_config(config, name).engine.max_model_len, teacher_prompt(config, name, tokenizer, row)
            if error := config.too_long(room, len(ids), config.rollout.max_response_tokens, sampled=1):
                yield row.number, f"teacher {name}: {error}; shorten its prompt_template, or raise engine.max_model_len"


def model_problems(config: Config) -> Iterator[str]:
    """Yield why a teacher with a path cannot be read, has other tokens than the policy, or does not suit the layout."""
    from dppo_megatron.data.tokenizer import load_tokenizer
    from dppo_megatron.hf import read_hf_config
    from dppo_megatron.train.actor import check_model
    from dppo_megatron.train.actor.model_config import shares_prefixes

    paths = {name: t.path for name, t in config.distillation.teachers.items() if t.path is not None}
    topk = config.distillation.topk
    for name, path in paths.items():
        try:
            models = [read_hf_config(model) for model in (path, config.model.path)]
            sizes, positions = [model.vocab_size for model in models], models[0].max_position_embeddings
            same = load_tokenizer(path).get_vocab() == load_tokenizer(config.model.path).get_vocab()
        except ExpectedError as error:
            yield f"distillation.teachers.{name}: {error}"
            continue
        prompt, served = config.data.max_prompt_tokens, path != config.trainer_teacher  # a server also samples
        response = config.rollout.max_response_tokens
        if config.samples and (problem := config.too_long(positions, prompt, response, sampled=served)):
            remedy = "lower data.max_prompt_tokens or rollout.max_response_tokens"
            yield f"distillation.teachers.{name}.path = {path}: {problem}; {remedy}"
        wrong = {
            "has another tokenizer than model.path; use a teacher of the same family": not same,
            f"has {sizes[0]} tokens, model.path {sizes[1]}; use a teacher with at least as many": sizes[0] < sizes[1],
            f"has {sizes[0]} tokens; lower distillation.topk ({topk}) to that": sizes[0] < topk,
        }
        if problem := next((problem for problem, holds in wrong.items() if holds), ""):
            yield f"distillation.teachers.{name}.path = {path}: {problem}"
        elif path == config.trainer_teacher:
            shares = shares_prefixes(read_hf_config(config.model.path), config)
            built = with_settings(trainer_teacher_config(config), train={"share_prefixes": shares})
            layout_problems = check_model(on_any_machine(built))
            yield from [f"distillation.teachers.{name}.in_trainer = true: {line}" for line in layout_problems]
