"""The sections `engine`, `rollout` and `weight_sync`: sampling, and the way of new weights to the engines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from dppo_megatron.common.dtypes import FloatName

from .section import (
    Bytes,
    Count,
    CountFromZero,
    EnvironmentName,
    FilePath,
    Float,
    Int,
    Positive,
    Processes,
    Seconds,
    Section,
    TokenId,
    Url,
    refusal,
)


class EngineConfig(Section):
    kind: Literal["vllm", "sglang"] = Field("vllm", description="the inference server")
    urls: tuple[Url, ...] = Field((), description="engines already running; empty = started with the run")
    secret_file: Path | None = Field(
        None, description="file with the secret that requests must send; default: RUN/secret, which is created"
    )
    count: Processes = Field(1, description="engines to start when urls is empty")
    tensor_parallel: Processes = Field(1, description="GPUs over which an engine shards each layer")
    pipeline_parallel: Processes = Field(
        1, description="pipeline stages of an engine, each on tensor_parallel GPUs; for vllm"
    )
    expert_parallel: bool = Field(False, description="each GPU stores whole experts, else a slice of every expert")
    nodes: Processes = Field(1, description="nodes of one engine, with equally many of its GPUs on each")
    placement: Literal["disaggregated", "colocated"] = Field(
        "disaggregated",
        description="disaggregated: engines have their own GPUs; colocated: they share the trainer's, and release "
        "their memory while it trains",
    )
    python: FilePath | None = Field(
        None,
        description="interpreter of the engine's environment; default: .venv-sglang next to this one for sglang, else "
        "this one",
    )
    host: str = Field("127.0.0.1", description="address at which started engines listen")
    port: CountFromZero = Field(0, le=65535, description="first port; 0 = a free one")
    dtype: FloatName | None = Field(None, description="default: model.dtype")
    quantization: Literal["none", "fp8_block", "fp8_block_emulated"] = Field(
        "none",
        description="fp8_block: every publish quantises the layers' projections to FP8 (e4m3, a scale per 128 x 128 "
        "values) and engines multiply in FP8, on GPUs. fp8_block_emulated: the same rounding, stored and multiplied "
        "in engine.dtype, to study the mismatch; it saves no memory",
    )
    max_model_len: Count | None = Field(None, ge=2, description="default: data.max_prompt_tokens + longest response")
    max_num_seqs: Count = Field(256, description="sequences that an engine samples at once")
    kv_cache_bytes: Bytes | None = Field(None, description="on each GPU; default: the engine's choice, 1 GiB on CPUs")
    max_logprobs: Count = Field(64, description="the engine's cap on top-K log-probs per token")
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = Field("processed_logprobs", description="not raw")
    seeded: bool = Field(
        True,
        description="the seed determines a sample's tokens, so a repeated request draws the same; SGLang then needs "
        "slower batch-invariant kernels, and without seeds draws from the same distribution",
    )
    exact: bool = Field(
        False,
        description="engine and trainer use the same operators, so their log-probs are bitwise equal; for dense models "
        "on CPUs, slower on both sides",
    )
    extra_args: tuple[str, ...] = Field((), description="appended to the server's command line")
    env: dict[EnvironmentName, str] = Field(default_factory=dict, description="environment variables of the server")
    start_timeout_s: Seconds = Field(600.0, description="an engine that does not answer by then has failed")
    request_timeout_s: Seconds | None = Field(
        None,
        description="a group without an answer for this long, including the engine's queue, is sent again; default: "
        "600 s + 0.5 s per possible token of a response",
    )
    health_interval_s: Seconds = Field(2.0, description="time between health checks of an engine")
    health_timeout_s: Seconds = Field(10.0, description="a health check that takes longer has failed")
    health_failures: Count = Field(
        3,
        description="consecutive failed health checks or requests that make an engine dead, so its requests move "
        "elsewhere; after twice as many failed checks the server is ended, and restarted if the run started it",
    )
    unavailable_timeout_s: Seconds = Field(
        900.0, description="waiting longer for any serving engine raises; a restart must fit in it"
    )
    restarts: CountFromZero = Field(
        5, description="consecutive restarts of an engine that the run started; one more end ends the run"
    )

    @property
    def devices(self) -> int:
        """GPUs of one engine."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def devices_per_node(self) -> int:
        """GPUs of one engine on each of its nodes."""
        return self.devices // self.nodes

    @property
    def serves_fp8(self) -> bool:
        """Whether the engines store FP8 weights, and not only weights rounded like FP8."""
        return self.quantization == "fp8_block"


class RolloutConfig(Section):
    prompts_per_step: Count = Field(64, description="prompts, and so groups, of a step")
    group_size: Count = Field(8, description="samples per prompt")
    max_response_tokens: Count = Field(1024, description="a longer response is cut there, and counts as truncated")
    temperature: Float = Field(
        1.0, ge=0.01, le=100, description="for sampling and log-probs; vLLM raises smaller values to 0.01"
    )
    top_p: Float = Field(
        1.0,
        ge=0,
        le=1,
        description="below 1: sample from the fewest tokens with this total probability; engines report the sampling "
        "mask of top_p, top_k and min_p at every position, and training renormalises over the same tokens",
    )
    top_k: Int = Field(
        -1, ge=-1, le=10**9, description="sample from this many most likely tokens; -1 = all; top_p and min_p need it"
    )
    min_p: Float = Field(
        0.0, ge=0, le=1, description="sample from tokens with at least this share of the top probability"
    )
    stop_token_ids: tuple[TokenId, ...] = Field((), description="besides the tokenizer's end-of-sequence token")
    topk_logprobs: CountFromZero = Field(
        0, description="K of the rollout policy's stored top-K tokens; top-K methods need > 0"
    )
    max_staleness: CountFromZero = Field(0, description="policy versions a rollout may lag behind; 0 = synchronous")
    on_update: Literal["keep", "wait", "abort"] = Field(
        "keep",
        description="requests running when weights change: keep = continue with the new weights, wait = finish first "
        "with the old ones, abort = end at once, and new requests continue from their tokens",
    )
    beyond_bound: Literal["wait", "drop", "train"] = Field(
        "wait",
        description="a group that is unfinished when its last allowed step needs it: wait = the step waits, drop = "
        "another prompt replaces the group, train = a later step trains on it, beyond max_staleness",
    )
    max_mismatch_kl: Positive | None = Field(
        None,
        description="a step with a larger mismatch/kl (engine against trainer, nats per token) ends the run; default: "
        "no limit",
    )
    max_concurrent_groups: Count = Field(256, description="groups that are sampled at once")
    dynamic_sampling: bool = Field(
        False, description="replace groups whose rewards are all equal by other prompts (DAPO)"
    )
    max_prompts_per_group: Count = Field(
        8, ge=2, description="dynamic_sampling: more prompts per group of a step, on average, are an error"
    )
    routing_replay: bool = Field(
        False, description="MoE: the trainer routes each token to the experts that the engine used (R3)"
    )
    bank: FilePath | None = Field(None, description="train on the rollouts of this bank, without sampling or engines")

    @property
    def has_sampling_mask(self) -> bool:
        """Return whether tokens are sampled from a part of the vocabulary, which the trainer then uses too."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def mask_request(self) -> dict[str, Any]:
        """Return the fields of a `GenerateRequest` that set the sampling mask."""
        if not self.has_sampling_mask:
            return {}
        return {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p, "sampling_mask": True}


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
        "broadcast: directly from the trainer's source ranks, over NCCL on GPUs, else gloo",
    )
    bucket_bytes: Bytes | None = Field(
        None, description="broadcast: size of a bucket; default: 256 MiB on GPUs, else 16 MiB"
    )
    directory: FilePath | None = Field(
        None,
        description="shared_storage: private directory for the versions, linked from RUN/weights, e.g. /dev/shm/NAME, "
        "which engines on the trainer's machine read from memory; default: RUN/weights",
    )
    keep_versions: Count = Field(
        2, description="shared_storage: versions kept on disk, besides those on which they are based"
    )
    full_every: Count = Field(
        1,
        description="shared_storage: one in this many publishes writes the whole model, the others only the weights "
        "whose bits changed since the previous one; 1 = all are whole",
    )
    read_ahead_bytes: Annotated[Int, Field(ge=0, le=1 << 50)] = Field(
        4 << 30,
        description="full_every: bytes of changed weights that each engine reads into its host's memory before it "
        "pauses to load; 0 = all are read in the pause",
    )
    lora: Literal["merged", "adapter"] = Field(
        "merged",
        description="with model.lora: merged = engines get whole weights that include the adapters; adapter = they get "
        "only the adapters and apply them to the start weights",
    )
    fingerprint: bool = Field(
        True, description="after an update, compare fingerprints of each engine's weights with the trainer's"
    )
    probe_tolerance: Positive | None = Field(
        None,
        description="largest mean engine-trainer log-prob difference in the weight check after a publish; default: "
        "1e-4 where both compute in fp32, 0.3 where either uses bf16, else 0.05 in fp16, 1.0 where either uses FP8, 0 "
        "with engine.exact",
    )
    timeout_s: Seconds = Field(600.0, description="limit for each part of an update; longer raises")
