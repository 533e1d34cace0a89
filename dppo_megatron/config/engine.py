"""Defines the sections `engine`, `rollout` and `weight_sync`, for sampling and for updating the engines' weights."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from dppo_megatron.common.dtypes import FloatName

from .section import (
    Bytes,
    BytesFromZero,
    Count,
    CountFromZero,
    Derived,
    EnvironmentName,
    FilePath,
    Float,
    Host,
    Int,
    Positive,
    Processes,
    Seconds,
    Section,
    TokenId,
    Url,
    refusal,
    setting,
)

KindName = Literal["vllm", "sglang"]


class EngineConfig(Section):
    kind: KindName = setting("vllm", "the inference server")
    urls: tuple[Url, ...] = setting((), "engines already running, http://HOST:PORT; empty = started with the run")
    secret_file: FilePath | None = setting(
        None, "file with the secret that requests must send; default: RUN/secret, which is created"
    )
    count: Processes = setting(1, "engines to start when urls is empty")
    tensor_parallel: Processes = setting(1, "GPUs over which an engine shards each layer")
    pipeline_parallel: Processes = setting(1, "pipeline stages of an engine, each on tensor_parallel GPUs; for vllm")
    expert_parallel: bool = setting(False, "each GPU stores whole experts, else a slice of every expert")
    nodes: Processes = setting(1, "nodes of one engine, with equally many of its GPUs on each")
    placement: Literal["disaggregated", "colocated"] = setting(
        "disaggregated",
        "disaggregated: engines have their own GPUs; colocated: they share the trainer's, and release their memory "
        "while it trains",
    )
    python: FilePath | None = setting(
        None,
        "interpreter of the engine's environment; default: .venv-sglang next to this one for sglang, else this one",
    )
    host: Host = setting("127.0.0.1", "address at which started engines listen")
    port: CountFromZero = setting(0, "first port; 0 = a free one", le=65535)
    dtype: Annotated[FloatName, Derived] = setting(None, "precision of the engines; default: model.dtype")
    quantization: Literal["none", "fp8_block", "fp8_block_emulated"] = setting(
        "none",
        "fp8_block: every publish quantizes the layers' projections to FP8 (e4m3, a scale per 128 x 128 values) and "
        "engines multiply in FP8, on GPUs. fp8_block_emulated: the same rounding, stored and multiplied in "
        "engine.dtype, to study the mismatch; it saves no memory",
    )
    max_model_len: Annotated[Count, Field(ge=2), Derived] = setting(
        None, "most tokens of a sequence; default: data.max_prompt_tokens + longest response"
    )
    max_num_seqs: Count = setting(256, "sequences that an engine samples at once")
    kv_cache_bytes: Bytes | None = setting(None, "KV cache of each GPU; default: the engine's choice, 1 GiB on CPUs")
    max_logprobs: Count = setting(64, "the engine's cap on top-K log-probs per token")
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = setting("processed_logprobs", "raw is rejected")
    seeded: bool = setting(
        True,
        "the seed determines a sample's tokens, so a repeated request draws the same; SGLang then needs slower "
        "batch-invariant kernels, and without seeds draws from the same distribution",
    )
    exact: bool = setting(
        False,
        "engine and trainer use the same operators, so their log-probs are bitwise equal; for dense models on CPUs, "
        "slower on both sides",
    )
    draft_tokens: Annotated[Int, Field(ge=0, le=128)] = setting(
        0,
        "tokens that an engine drafts at most from earlier samples of the prompt; it samples every drafted position "
        "itself, so tokens and log-probs are those of a run without drafts; 0 = off; for vllm on CPUs",
    )
    draft_batch: Count = setting(8, "draft_tokens: drafts are made while at most this many sequences run on an engine")
    extra_args: tuple[str, ...] = setting((), "appended to the server's command line")
    env: dict[EnvironmentName, str] = setting({}, "environment variables of the server")
    start_timeout_s: Seconds = setting(600.0, "an engine that does not answer by then has failed")
    request_timeout_s: Seconds | None = setting(
        None,
        "a group without an answer for this long, including the engine's queue, is sent again; default: 600 s + 0.5 s "
        "per possible token of a response",
    )
    health_interval_s: Seconds = setting(2.0, "time between health checks of an engine")
    health_timeout_s: Seconds = setting(10.0, "a health check that takes longer has failed")
    health_failures: Count = setting(
        3,
        "consecutive failed health checks or requests that make an engine dead, so its requests move elsewhere; after "
        "twice as many failed checks the server is ended, and restarted if the run started it",
    )
    unavailable_timeout_s: Seconds = setting(
        900.0, "the run ends if no engine serves for this long; a restart must fit in it"
    )
    restarts: CountFromZero = setting(
        5, "consecutive restarts of an engine that the run started; one more end ends the run"
    )

    @property
    def devices(self) -> int:
        """Return how many GPUs an engine uses."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def devices_per_node(self) -> int:
        """Return how many GPUs an engine uses on each node."""
        return self.devices // self.nodes

    @property
    def serves_fp8(self) -> bool:
        """Return whether the engines store FP8 weights. With `fp8_block_emulated` they only round like FP8."""
        return self.quantization == "fp8_block"


def _not_greedy(value: Any) -> Any:
    if type(value) in (int, float) and 0 <= value < 0.01:
        raise refusal("all samples of a group would be equal, without an advantage; use e.g. 1.0 (eval is greedy)")
    return value


class RolloutConfig(Section):
    prompts_per_step: Count = setting(64, "prompts, and so groups, of a step")
    group_size: Count = setting(8, "samples per prompt")
    max_response_tokens: Count = setting(1024, "a longer response is cut there, and counts as truncated")
    temperature: Annotated[Float, BeforeValidator(_not_greedy)] = setting(
        1.0, "temperature of sampling and log-probs", ge=0.01, le=100
    )
    top_p: Float = setting(
        1.0,
        "below 1: sample from the fewest tokens with this total probability; engines report the sampling mask of "
        "top_p, top_k and min_p at every position, and training renormalizes over the same tokens",
        ge=0,
        le=1,
    )
    top_k: Int = setting(
        -1, "sample from this many most likely tokens; -1 = all; top_p and min_p need it", ge=-1, le=10**9
    )
    min_p: Float = setting(0.0, "sample from tokens with at least this share of the top probability", ge=0, le=1)
    stop_token_ids: tuple[TokenId, ...] = setting((), "tokens that end a response, in addition to the tokenizer's")
    topk_logprobs: CountFromZero = setting(0, "K of the rollout policy's stored top-K tokens; top-K methods need > 0")
    max_staleness: CountFromZero = setting(0, "policy versions a rollout may lag behind; 0 = synchronous")
    on_update: Literal["keep", "wait", "abort"] = setting(
        "keep",
        "requests running when weights change: keep = continue with the new weights, wait = finish first with the old "
        "ones, abort = end at once, and new requests continue from their tokens",
    )
    beyond_bound: Literal["wait", "drop", "train"] = setting(
        "wait",
        "a group that is unfinished when its last allowed step needs it: wait = the step waits, drop = another prompt "
        "replaces the group, train = a later step trains on it, beyond max_staleness",
    )
    max_mismatch_kl: Positive | None = setting(
        None,
        "a step with a larger mismatch/kl (engine against trainer, nats per token) ends the run; default: no limit",
    )
    max_concurrent_groups: Count = setting(256, "groups that are sampled at once")
    dynamic_sampling: bool = setting(False, "replace groups whose rewards are all equal by other prompts (DAPO)")
    max_prompts_per_group: Annotated[Count, Field(ge=2)] = setting(
        8, "dynamic_sampling: more prompts per group of a step, on average, are an error"
    )
    routing_replay: bool = setting(False, "MoE: the trainer routes each token to the experts that the engine used (R3)")
    bank: FilePath | None = setting(None, "train on the rollouts of this bank, without sampling or engines")

    @property
    def has_sampling_mask(self) -> bool:
        """Return whether tokens are sampled from part of the vocabulary. The trainer then uses the same part."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def mask_request(self) -> dict[str, Any]:
        """Return the `GenerateRequest` fields that set the sampling mask."""
        if not self.has_sampling_mask:
            return {}
        return {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p, "sampling_mask": True}


def _no_ipc(value: Any) -> Any:
    if value == "ipc":
        raise refusal(
            "does not exist: CUDA IPC needs the whole weights in the memory of the engine's own GPU, but actor and "
            "engine use a GPU in turns; use shared_storage, on one machine with weight_sync.directory in /dev/shm"
        )
    return value


class WeightSyncConfig(Section):
    transport: Annotated[Literal["shared_storage", "broadcast"], BeforeValidator(_no_ipc)] = setting(
        "shared_storage",
        "shared_storage: a model directory per version, on storage that trainer and engines share; broadcast: "
        "directly from the trainer's source ranks, over NCCL on GPUs, else gloo",
    )
    bucket_bytes: Bytes | None = setting(None, "broadcast: size of a bucket; default: 256 MiB on GPUs, else 16 MiB")
    directory: FilePath | None = setting(
        None,
        "shared_storage: private directory for the versions, linked from RUN/weights, e.g. /dev/shm/NAME, which "
        "engines on the trainer's machine read from memory; default: RUN/weights",
    )
    keep_versions: Count = setting(2, "shared_storage: versions kept on disk, in addition to those they need")
    full_every: Count = setting(
        1,
        "shared_storage: one in this many publishes writes the whole model, the others only the weights whose bits "
        "changed since the previous one; 1 = all are whole",
    )
    read_ahead_bytes: BytesFromZero = setting(
        4 << 30,
        "full_every: bytes of changed weights that each engine reads into its host's memory before it pauses to load; "
        "0 = all are read in the pause",
    )
    lora: Literal["merged", "adapter"] = setting(
        "merged",
        "with model.lora: merged = engines get whole weights that include the adapters; adapter = they get only the "
        "adapters and apply them to the start weights",
    )
    fingerprint: bool = setting(
        True, "after an update, compare fingerprints of each engine's weights with the trainer's"
    )
    probe_tolerance: Positive | None = setting(
        None,
        "largest mean engine-trainer log-prob difference in the weight check after a publish; default: 1e-4 where "
        "both compute in fp32, 0.3 where either uses bf16, else 0.05 in fp16, 1.0 where either uses FP8, 0 with "
        "engine.exact",
    )
    timeout_s: Seconds = setting(600.0, "time limit of each part of an update")
