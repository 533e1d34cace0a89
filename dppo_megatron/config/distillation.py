"""Defines the section `distillation`: the teachers of `objective.settings.distillation`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .section import Count, FilePath, Processes, Seconds, Section, Url, setting

TeacherName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]


class TeacherConfig(Section):
    """Describes a teacher with the tokens of `model.path`: running servers, a model to serve, or the policy itself."""

    urls: tuple[Url, ...] = setting((), "stock servers of the teacher, already running; they share the requests")
    path: FilePath | None = setting(
        None,
        "Hugging Face directory of a teacher that the run serves as it serves engines; without urls and path the "
        "engines score with the policy that they serve",
    )
    kind: Literal["vllm", "sglang"] | None = setting(None, "the inference server; default: engine.kind")
    tensor_parallel: Processes = setting(1, "path: GPUs of its server")
    secret_file: FilePath | None = setting(None, "urls: file with the key that requests send as a bearer token")
    sources: tuple[str, ...] = setting((), "only for rows of these data sources; empty = all other rows")
    prompt_template: str | None = setting(
        None,
        "text around the prompt that only the teacher reads; {prompt} and {answer} are replaced; default: the prompt "
        "of the policy",
    )


class DistillationConfig(Section):
    topk: Count = setting(20, "K most likely tokens that a teacher returns for each sampled token", le=2**16)
    teachers: dict[TeacherName, TeacherConfig] = Field(
        default_factory=dict, description="the teachers by name; objective.settings.distillation uses them"
    )
    request_timeout_s: Seconds = setting(600.0, "a request that a teacher does not answer by then is sent again")
    unavailable_timeout_s: Seconds = setting(
        1800.0, "a group that no server of its teacher has scored by then ends the run, which can be resumed"
    )
    max_requests: Count = setting(32, "requests that a teacher has at once")

    def of_source(self, source: str) -> str | None:
        """Return the name of the teacher for rows of this data source; None if there is none."""
        own = [name for name, teacher in self.teachers.items() if source in teacher.sources]
        return next(iter([*own, *(name for name, teacher in self.teachers.items() if not teacher.sources)]), None)
