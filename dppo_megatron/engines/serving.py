"""What the engines of a run serve: the model they start with, and whether a running server suits the run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dppo_megatron.common.dtypes import DTYPES
from dppo_megatron.config import Config
from dppo_megatron.hf import inverse_frequencies, padded_vocab_size, read_hf_config
from dppo_megatron.run_dir import RunDir
from dppo_megatron.weights.fingerprint import Fingerprint, of_workers

from .exact import Exact
from .protocol import EngineError, EngineIncompatible, EngineInfo

Device = Literal["cpu", "cuda"]


class Node(NamedTuple):
    """A node of an engine that spans several, and where node 0, which answers requests, lets all of them meet."""

    rank: int
    host: str
    port: int


# Tens of microseconds by libgomp's count, longer than most pauses between two operators of a small model: an eighth of
# the time of sampling at 20 M parameters. Three times as long takes the cores from whoever else has work for them.
SPINS = 3000
CPU_KV_CACHE_BYTES = 2**30  # by default engines take a share of all memory, which other processes need as well


def device_here() -> Device:
    """What servers started on this machine run on."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def cpu_threads(config: Config) -> dict[str, str]:
    """Variables for a server on CPUs: a thread for each core, asleep while trainer and API process compute."""
    variables = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), "OMP_WAIT_POLICY": "PASSIVE"}
    if config.engine.count == 1:  # engines that share the cores would spin while another one computes
        variables["GOMP_SPINCOUNT"] = str(SPINS)
    return variables


def start_model(config: Config) -> Path:
    """`model.path`, or with `engine.quantization: fp8_block` the quantised copy in the run directory
    (`launch.engine`), for an engine takes only weights that are stored as those it started with."""
    if not config.engine.serves_fp8 or read_hf_config(config.model.path).quantization is not None:
        return config.model.path
    return RunDir(config.run.dir).quantized_start


def exact_environment(config: Config) -> dict[str, str]:
    """What a server must be told with `engine.exact`; else nothing."""
    if not config.engine.exact:
        return {}
    hf, ranks = read_hf_config(config.model.path), config.parallel.tensor
    return Exact(
        tensor=ranks,
        frequencies=tuple(inverse_frequencies(hf).tolist()),
        vocab_size=hf.vocab_size,
        shard_columns=padded_vocab_size(hf.vocab_size, ranks) // ranks,
        fp32_head=config.model.fp32_head,
    ).to_environment()


def check_info(url: str, info: EngineInfo, config: Config, vocab_size: int | None) -> None:
    """Raises `EngineIncompatible` with every setting of the server that disagrees with `config`, and its remedy.

    `vocab_size` is that of the trainer's model; None leaves it unchecked.
    """
    rollout, engine = config.rollout, config.engine
    cap = info.max_logprobs if info.max_logprobs >= 0 else info.vocab_size
    dtype = DTYPES[engine.dtype].long
    setting, response = max(config.response_tokens.items(), key=lambda item: item[1])
    longest = config.data.max_prompt_tokens + response
    problems = [
        (
            info.logprobs_mode != "processed_logprobs",
            f"logprobs mode {info.logprobs_mode}: log-probs are not those of the sampled distribution; start it "
            "with --logprobs-mode processed_logprobs (vLLM) or without SGLANG_RETURN_ORIGINAL_LOGPROB (SGLang)",
        ),
        (
            rollout.topk_logprobs > cap,
            f"returns at most {cap} top-K log-probs a token, rollout.topk_logprobs = {rollout.topk_logprobs}; start it "
            "with a higher --max-logprobs (engine.max_logprobs) or lower K",
        ),
        (
            rollout.topk_logprobs > info.vocab_size,
            f"vocabulary of {info.vocab_size}, rollout.topk_logprobs = {rollout.topk_logprobs}; lower K",
        ),
        (
            info.max_model_len < longest,
            f"sequences of at most {info.max_model_len} tokens, data.max_prompt_tokens = "
            f"{config.data.max_prompt_tokens} + {setting} = {response}: responses "
            "would be truncated; raise --max-model-len or --context-length (engine.max_model_len)",
        ),
        (
            info.dtype != dtype,
            f"runs in {info.dtype}, engine.dtype = {engine.dtype}; start it with --dtype {dtype} or change the setting",
        ),
        (
            vocab_size is not None and info.vocab_size != vocab_size,
            f"vocabulary of {info.vocab_size}, the model in {config.model.path} has {vocab_size}; start it from "
            "that model",
        ),
        (
            rollout.routing_replay and not info.routed_experts,
            "does not return routed experts, which rollout.routing_replay needs; start it with "
            "--enable-return-routed-experts, or set rollout.routing_replay to false",
        ),
        (
            rollout.has_sampling_mask and not info.sampling_mask,
            f"does not report which tokens rollout.top_p = {rollout.top_p}, top_k = {rollout.top_k}, min_p = "
            f"{rollout.min_p} left to draw from, which the trainer replays; start it with --return-sampling-mask (vLLM "
            "on GPUs), or set them to 1, -1 and 0",
        ),
    ]
    wrong = [*info.problems, *(message for is_wrong, message in problems if is_wrong)]
    if wrong:
        raise EngineIncompatible(f"engine {url} does not suit this run:\n  " + "\n  ".join(wrong))


def held_weights(url: str, workers: Any) -> Fingerprint:
    """Of an engine, from what its workers report. Raises `EngineError` where they hold unequal copies."""
    try:
        whole, unequal = of_workers(
            {group: share and (int(share[0]), int(share[1])) for group, share in worker.items()} for worker in workers
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise EngineError(f"engine {url}: fingerprints of its weights: garbled reply: {error}") from None
    if unequal:
        raise EngineError(f"engine {url}: its workers hold unequal copies of {', '.join(unequal)}")
    return whole
