"""Define the base class of all HTTP clients, and check a running server against the config."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from dppo_megatron.common.dtypes import DTYPES
from dppo_megatron.config import Config
from dppo_megatron.weights.fingerprint import Fingerprint, join_workers

from .byte_budget import ByteBudget
from .http import EngineCalls
from .protocol import Engine, EngineError, EngineIncompatible, EngineInfo, EngineRefused, InvalidSample
from .secret import read_secret
from .trace import UNSEEN, Trace, joined


class HttpEngine(Engine):
    """Implements the methods of `Engine` that all clients share.

    A client is bound to the event loop that uses it first. `config.request_timeout_s` bounds `generate` and `score`.
    `config.weight_sync.timeout_s` bounds a weight update, including the wait for running requests.
    """

    def __init__(self, config: Config, url: str, budget: ByteBudget | None, unknown_route: str):
        """Create the client. All clients of this process share `budget`; None creates a budget for this client."""
        self.url = url.rstrip("/")
        self._budget = budget or ByteBudget()
        self._generate_timeout_s = config.request_timeout_s
        self._update_timeout_s = config.weight_sync.timeout_s
        self._calls = EngineCalls(self.url, read_secret(config), unknown_route)
        self.counts: Counter[str] = Counter()
        self._limits: EngineInfo | None = None
        self._first_use = asyncio.Lock()

    async def close(self) -> None:
        await self._calls.close()

    async def check_compatible(self, config: Config, *, vocab_size: int | None = None) -> EngineInfo:
        info = await self.info()
        check_info(self.url, info, config, vocab_size)
        return info

    async def _static_info(self) -> EngineInfo:
        async with self._first_use:
            if self._limits is None:
                self._limits = await self.info()
            return self._limits

    def _joined(self, action: str, decode: Callable[[], list[Trace]]) -> Trace:
        """Join the workers' traces, which `decode` returns, into a single trace."""
        try:
            trace = joined(decode())
        except (KeyError, ValueError, AttributeError, TypeError, RuntimeError) as error:
            raise InvalidSample(f"engine {self.url}: {action}: garbled reply: {error!r}") from error
        if not trace:
            raise EngineRefused(f"engine {self.url}: {action}: {UNSEEN}")
        return trace

    def _fingerprint(self, workers: Any) -> Fingerprint:
        """Combine the shares that the workers report into fingerprints of the whole weights.

        Raises `EngineError` if workers have different copies of a weight.
        """
        try:
            whole, unequal = join_workers(
                {group: share and (int(share[0]), int(share[1])) for group, share in worker.items()}
                for worker in workers
            )
        except (TypeError, ValueError, AttributeError) as error:
            raise EngineError(f"engine {self.url}: fingerprints of its weights: garbled reply: {error}") from None
        if unequal:
            raise EngineError(f"engine {self.url}: its workers have different copies of {', '.join(unequal)}")
        return whole


def check_info(url: str, info: EngineInfo, config: Config, vocab_size: int | None) -> None:
    """Raise `EngineIncompatible` that lists every server setting that disagrees with `config`, with a remedy.

    `vocab_size` is the trainer model's vocabulary size. None skips this check.
    """
    rollout, engine = config.rollout, config.engine
    cap = info.max_logprobs if info.max_logprobs >= 0 else info.vocab_size
    dtype = DTYPES[engine.dtype].long
    longest = config.too_long(info.max_model_len)
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
            longest is not None,
            f"sequences of at most {info.max_model_len} tokens, {longest}: responses would be truncated; raise "
            "--max-model-len or --context-length (engine.max_model_len)",
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
