"""Defines the section `distillation`: the teachers for `objective.settings.distillation`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .engine import KindName
from .section import Count, FilePath, Processes, Seconds, Section, Url, setting

TeacherName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]


class TeacherConfig(Section):
    urls: tuple[Url, ...] = setting((), "stock servers of the teacher that are already running")
    path: FilePath | None = setting(
        None, "Hugging Face model that the run serves; without urls and path the policy's engines are the teacher"
    )
    kind: KindName | None = setting(None, "the inference server; default: engine.kind")
    tensor_parallel: Processes = setting(1, "path: GPUs of its server")
    in_trainer: bool = setting(False, "path: a frozen copy on the trainer's ranks scores, instead of a server")
    secret_file: FilePath | None = setting(None, "urls: file with the bearer token of the servers; default: none")
    sources: tuple[str, ...] = setting((), "only for rows of these data sources; empty = all others")
    prompt_template: str | None = setting(
        None, "text around the prompt for this teacher, with {prompt} and {answer}; default: the policy's prompt"
    )


class DistillationConfig(Section):
    topk: Count = setting(20, "K most likely tokens that a teacher returns for each sampled token", le=2**16)
    teachers: dict[TeacherName, TeacherConfig] = setting({}, "teachers by name, for objective.settings.distillation")
    request_timeout_s: Seconds = setting(600.0, "a request without an answer for this long is sent again")
    unavailable_timeout_s: Seconds = setting(900.0, "a group that is not scored by then ends the run; resume it")

    def teacher_of(self, source: str) -> str | None:
        """Return the teacher name for rows from this data source, or None if the source has no teacher."""
        matches = [name for name, teacher in self.teachers.items() if source in teacher.sources]
        return next(iter([*matches, *(name for name, teacher in self.teachers.items() if not teacher.sources)]), None)
