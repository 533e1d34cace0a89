"""A vLLM server with our extension, as an `Engine`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from ..config.schema import Config
from ..types import Rollout
from .engine import (
    EngineError,
    EngineIncompatible,
    EngineInfo,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
    GenerateRequest,
    SpoiltSample,
    UpdateMode,
)
from .http_pools import HttpPools
from .samples import LOGPROB_TOLERANCE, GroupSamples
from .vllm_extension.wire import decode_frame, encode_request

CONTROL_TIMEOUT_S = 30.0  # questions an engine answers at once, even under load
RETRY_BUSY_S = (0.05, 1.0)  # first and longest wait after "503, try again"
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class VllmEngine:
    """HTTP client of one server; implements `dppo_megatron.rollout.engine.Engine`.

    Bound to the event loop it is first used in, and to the life of the server that it first samples from: the samples
    of a restarted one are refused. `config.engine.request_timeout_s` bounds `generate` and `score`,
    `config.weight_sync.timeout_s` bounds `load_weights`, waiting for running requests included.
    """

    def __init__(self, config: Config, url: str):
        self.url = url.rstrip("/")
        self._generate_timeout_s = config.engine.request_timeout_s
        self._update_timeout_s = config.weight_sync.timeout_s
        self._limits: EngineInfo | None = None
        self._limits_lock = asyncio.Lock()
        self._http = HttpPools(self.url)

    async def generate(self, request: GenerateRequest) -> tuple[Rollout, ...]:
        """See `Engine.generate`. The arrays are read-only views of the reply."""
        what = f"generation of group {request.request_id}"
        limits = await self._static_info()
        reply = await self._call(what, "/dppo/generate", self._generate_timeout_s, content=encode_request(request))
        header, arrays = self._frame(what, reply)
        if header.get("instance", limits.instance) != limits.instance:
            raise EngineUnavailable(f"engine {self.url}: {what}: the server was restarted; its weights are unknown")
        try:
            samples = GroupSamples(
                lengths=arrays["lengths"],
                finish_reasons=tuple(header["finish_reasons"]),
                token_ids=arrays["token_ids"],
                logprobs=arrays["logprobs"],
                versions=arrays["versions"],
                topk_ids=arrays.get("topk_ids"),
                topk_logprobs=arrays.get("topk_logprobs"),
            )
        except (KeyError, TypeError) as error:
            raise SpoiltSample(f"engine {self.url}: {what}: the reply lacks {error}") from error
        try:
            samples.check(request, vocab_size=limits.vocab_size, max_model_len=limits.max_model_len)
        except SpoiltSample as error:
            raise SpoiltSample(f"engine {self.url}: {error}") from None
        return samples.rollouts()

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        what = f"scoring of {len(token_ids)} tokens"
        body = {"token_ids": np.asarray(token_ids).tolist()}
        _, arrays = self._frame(what, await self._call(what, "/dppo/score", self._generate_timeout_s, body=body))
        logprobs = arrays.get("logprobs")
        if logprobs is None or logprobs.shape != (len(token_ids) - 1,):
            raise SpoiltSample(f"engine {self.url}: {what}: expected {len(token_ids) - 1} log-probs, got {logprobs}")
        if not (np.isfinite(logprobs).all() and (logprobs <= LOGPROB_TOLERANCE).all()):
            raise SpoiltSample(f"engine {self.url}: {what}: log-probs not finite or above 0: {logprobs}")
        return logprobs

    async def load_weights(self, path: Path, version: int, mode: UpdateMode = "keep") -> None:
        what = f"loading policy {version} from {path}"
        body = {
            "path": str(Path(path).absolute()),
            "version": int(version),
            "mode": mode,
            "wait_s": 0.9 * self._update_timeout_s,  # the server gives up first and says why
        }
        reply = self._json(what, await self._call(what, "/dppo/load_weights", self._update_timeout_s, body=body))
        if reply.get("version") != version:
            raise EngineError(f"engine {self.url}: {what}: it reports version {reply.get('version')}")

    async def info(self) -> EngineInfo:
        reply = self._json("its description", await self._call("its description", "/dppo/info", CONTROL_TIMEOUT_S))
        try:
            return EngineInfo(**{**reply, "problems": tuple(reply["problems"])})
        except (KeyError, TypeError) as error:
            raise EngineIncompatible(f"engine {self.url}: its description is not ours: {error}") from error

    async def version(self) -> int:
        return (await self.info()).version

    async def health(self) -> None:
        await self._call("health", "/health", CONTROL_TIMEOUT_S, retry_busy=False)

    async def abort(self, request_id: str) -> None:
        body = {"request_id": request_id}
        await self._call(f"abort of {request_id}", "/dppo/abort", CONTROL_TIMEOUT_S, body=body)

    async def close(self) -> None:
        await self._http.close()

    async def check_compatible(self, config: Config, *, vocab_size: int | None = None) -> EngineInfo:
        """Raises `EngineIncompatible` with every setting of the server that disagrees with `config`.

        `vocab_size` is that of the trainer's model; None leaves it unchecked.
        """
        info = await self.info()
        rollout, engine = config.rollout, config.engine
        cap = info.max_logprobs if info.max_logprobs >= 0 else info.vocab_size
        dtype = _DTYPES[engine.dtype]
        problems = [
            (
                info.logprobs_mode != "processed_logprobs",
                f"logprobs mode {info.logprobs_mode}: log-probs are not those of the sampled distribution; start it "
                "with --logprobs-mode processed_logprobs",
            ),
            (
                rollout.topk_logprobs > cap,
                f"lists at most {cap} log-probs a token, rollout.topk_logprobs = {rollout.topk_logprobs}; start it "
                "with a higher --max-logprobs (engine.max_logprobs) or lower K",
            ),
            (
                rollout.topk_logprobs > info.vocab_size,
                f"vocabulary of {info.vocab_size}, rollout.topk_logprobs = {rollout.topk_logprobs}; lower K",
            ),
            (
                info.max_model_len <= rollout.max_response_tokens,
                f"sequences of at most {info.max_model_len} tokens leave no room for a prompt beside "
                f"rollout.max_response_tokens = {rollout.max_response_tokens}; raise --max-model-len "
                "(engine.max_model_len)",
            ),
            (
                info.dtype != dtype,
                f"runs in {info.dtype}, engine.dtype = {engine.dtype}; start it with --dtype {dtype} or change the "
                "setting",
            ),
            (
                vocab_size is not None and info.vocab_size != vocab_size,
                f"vocabulary of {info.vocab_size}, the model in {config.model.path} has {vocab_size}; start it from "
                "that model",
            ),
        ]
        wrong = [*info.problems, *(message for is_wrong, message in problems if is_wrong)]
        if wrong:
            raise EngineIncompatible(f"engine {self.url} does not suit this run:\n  " + "\n  ".join(wrong))
        return info

    async def _static_info(self) -> EngineInfo:
        async with self._limits_lock:
            if self._limits is None:
                self._limits = await self.info()
            return self._limits

    async def _call(
        self,
        what: str,
        path: str,
        timeout_s: float,
        *,
        content: bytes | None = None,
        body: dict[str, Any] | None = None,
        retry_busy: bool = True,
    ) -> bytes:
        """Body of a 200 reply; POST when there is something to send."""
        content = json.dumps(body).encode() if body is not None else content
        wait = RETRY_BUSY_S[0]
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    reply = await self._http.request("GET" if content is None else "POST", path, content)
                    # Servers refuse new requests for a moment while they are paused or their queue is full.
                    if reply.status_code != 503 or not retry_busy:
                        break
                    await asyncio.sleep(wait)
                    wait = min(2 * wait, RETRY_BUSY_S[1])
        except TimeoutError:
            raise EngineTimeout(f"engine {self.url}: no answer within {timeout_s:g} s to {what}") from None
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            raise EngineUnavailable(f"engine {self.url}: connection failed during {what}: {reason}") from None
        if reply.status_code == 200:
            return reply.content
        raise self._failure(what, reply)

    def _failure(self, what: str, reply: httpx.Response) -> EngineError:
        try:
            reason = reply.json()["error"]
        except (ValueError, KeyError, TypeError):
            reason = reply.text[:300]
        message = f"engine {self.url}: {what} failed with status {reply.status_code}: {reason}"
        if reply.status_code == 404:
            return EngineIncompatible(f"{message} (is it a vLLM server started with VLLM_PLUGINS=dppo_megatron?)")
        if reply.status_code == 504:
            return EngineTimeout(message)
        if reply.status_code == 503:
            return EngineUnavailable(message)
        return EngineRefused(message) if reply.status_code in (400, 413, 422) else EngineError(message)

    def _frame(self, what: str, reply: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        try:
            return decode_frame(reply)
        except ValueError as error:
            raise SpoiltSample(f"engine {self.url}: {what}: garbled reply: {error}") from error

    def _json(self, what: str, reply: bytes) -> dict[str, Any]:
        try:
            parsed = json.loads(reply)
        except ValueError as error:
            raise EngineError(f"engine {self.url}: {what}: garbled reply: {reply[:200]!r}") from error
        if not isinstance(parsed, dict):
            raise EngineError(f"engine {self.url}: {what}: garbled reply: {reply[:200]!r}")
        return parsed
