"""The section `weight_sync`: how the trainer's weights reach the engines, and when a publish counts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from .section import Bytes, Count, FilePath, Int, Positive, Seconds, Section, refusal


def _no_ipc(value: Any) -> Any:
    if value == "ipc":
        raise refusal(
            "is not there: CUDA IPC hands over weights that lie whole in the memory of the engine's own GPU, and actor "
            "and engine take turns on one; use shared_storage, on one machine with weight_sync.directory in /dev/shm"
        )
    return value


class WeightSyncConfig(Section):
    transport: Annotated[Literal["shared_storage", "broadcast"], BeforeValidator(_no_ipc)] = Field(
        "shared_storage",
        description="shared_storage: a model directory per version, on storage that trainer and engines share; "
        "broadcast: straight from the trainer's source ranks, over NCCL on GPUs, else gloo",
    )
    bucket_bytes: Bytes | None = Field(
        None, description="broadcast: weights that travel at once; default: 256 MiB on GPUs, else 16 MiB"
    )
    directory: FilePath | None = Field(
        None,
        description="shared_storage: where versions are written, made for its owner alone, and RUN/weights leads "
        "there; such as /dev/shm/NAME, which engines on the trainer's machine read from memory; default: RUN/weights",
    )
    keep_versions: Count = Field(
        2, description="shared_storage: published weight directories kept on disk, beside those that they are made from"
    )
    full_every: Count = Field(
        1,
        description="shared_storage: of so many publishes in a row one is of the whole model, and the others are of "
        "the weights whose bits changed since the publish before; 1 = all are whole",
    )
    read_ahead_bytes: Annotated[Int, Field(ge=0, le=1 << 50)] = Field(
        4 << 30,
        description="full_every: of what changed, each engine reads so much before it pauses to load it, in the memory "
        "of its host; 0 = all of it is read in the pause",
    )
    lora: Literal["merged", "adapter"] = Field(
        "merged",
        description="of a run with model.lora: merged = engines get whole weights, with the adapters merged; adapter = "
        "they get the adapters alone and multiply by them beside the start weights",
    )
    fingerprint: bool = Field(
        True, description="after an update the trainer compares fingerprints of the weights that each engine holds"
    )
    probe_tolerance: Positive | None = Field(
        None,
        description="largest engine-trainer log-prob difference after a publish, in the mean over the tokens of the "
        "weight check; default: 1e-4 where both compute in fp32, 0.3 where either does in bf16, else 0.05 in fp16, 1.0 "
        "where either does in FP8, 0 with engine.exact",
    )
    timeout_s: Seconds = Field(600.0, description="of every single step of an update; longer raises")
