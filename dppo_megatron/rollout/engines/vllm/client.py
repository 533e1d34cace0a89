"""Call a vLLM server with our extension as an `Engine`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from dppo_megatron.config import Config
from dppo_megatron.rollout.engines.byte_budget import ByteBudget, ReplySlot
from dppo_megatron.rollout.engines.client import HttpEngine
from dppo_megatron.rollout.engines.http import CONTROL_TIMEOUT_S, REQUEST_TIMEOUT_REMEDY, decoded
from dppo_megatron.rollout.engines.protocol import (
    EngineError,
    EngineIncompatible,
    EngineInfo,
    EngineUnavailable,
    GenerateRequest,
    InvalidSample,
    UpdateMode,
)
from dppo_megatron.rollout.engines.samples import GroupSamples, check_scores
from dppo_megatron.rollout.engines.trace import Trace
from dppo_megatron.types import Rollout
from dppo_megatron.weights.broadcast_plan import WeightGroupPlan
from dppo_megatron.weights.fingerprint import Fingerprint

from .extension.wire import decode_reply, decode_samples, decode_trace, encode_request


class VllmEngine(HttpEngine):
    """Calls a server over HTTP.

    The client is bound to the server instance that it first samples from. It rejects samples from a restarted server.
    """

    def __init__(self, config: Config, url: str, budget: ByteBudget | None = None):
        super().__init__(config, url, budget, "is it a vLLM server started with VLLM_PLUGINS=dppo_megatron?")
        self._read_ahead_bytes = config.weight_sync.read_ahead_bytes
        # The server accepts each id once, and may still be ending requests from an earlier client, such as the
        # orchestrator before a restart. So this client appends a suffix to each id.
        self._suffix = f"~{uuid4().hex[:8]}"

    async def generate(self, request: GenerateRequest) -> tuple[Rollout, ...]:
        action = f"generation of group {request.request_id}"
        limits = await self._static_info()
        sent = replace(request, request_id=request.request_id + self._suffix)
        with ReplySlot(self._budget) as slot:
            reply = await self._calls.call(
                action,
                "/dppo/generate",
                self._generate_timeout_s,
                content=encode_request(sent),
                timeout_remedy=REQUEST_TIMEOUT_REMEDY,
                slot=slot,
            )
            samples = await decoded(self._decode_samples, reply, action, request, sent.request_id, limits)
        self.counts.update(samples.counts)
        return samples.rollouts(len(request.token_ids))

    def _decode_samples(
        self, reply: bytes | bytearray, action: str, request: GenerateRequest, sent_id: str, limits: EngineInfo
    ) -> GroupSamples:
        header, arrays = self._decode(action, reply)
        if header.get("instance", limits.instance) != limits.instance:
            raise EngineUnavailable(f"engine {self.url}: {action}: the server was restarted; its weights are unknown")
        if header.get("request_id") != sent_id:
            raise InvalidSample(f"engine {self.url}: {action}: the reply is to {header.get('request_id')!r}")
        try:
            samples = decode_samples(header, arrays)
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidSample(f"engine {self.url}: {action}: the reply lacks {error}") from error
        try:
            samples.check(request, vocab_size=limits.vocab_size, max_model_len=limits.max_model_len)
        except InvalidSample as error:
            raise InvalidSample(f"engine {self.url}: {error}") from None
        return samples

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        action = f"scoring of {len(token_ids)} tokens"
        body = {"token_ids": np.asarray(token_ids).tolist()}
        _, arrays = self._decode(
            action, await self._calls.call(action, "/dppo/score", self._generate_timeout_s, body=body)
        )
        return check_scores(f"engine {self.url}: {action}", arrays.get("logprobs"), len(token_ids) - 1)

    async def trace(self, token_ids: np.ndarray) -> tuple[Trace, np.ndarray]:
        action = f"recording the pass of {len(token_ids)} tokens"
        body = {"token_ids": np.asarray(token_ids).tolist()}
        header, arrays = self._decode(
            action, await self._calls.call(action, "/dppo/trace", self._generate_timeout_s, body=body)
        )
        trace = self._joined(action, lambda: decode_trace(header, arrays))
        return trace, check_scores(f"engine {self.url}: {action}", arrays.get("logprobs"), len(token_ids) - 1)

    async def load_weights(self, path: Path, version: int, mode: UpdateMode = "keep") -> float:
        source = {"path": str(Path(path).absolute()), "read_ahead_bytes": self._read_ahead_bytes}
        return await self._update(f"loading policy {version} from {path}", "/dppo/load_weights", source, version, mode)

    async def join_weight_group(self, plan: WeightGroupPlan) -> None:
        action = f"joining weight group {plan.name}"
        await self._calls.call(action, "/dppo/join_weight_group", self._update_timeout_s, body=plan.to_json())

    async def receive_weights(self, group: str, step: str, version: int, mode: UpdateMode = "keep") -> float:
        source = {"group": group, "step": step}
        return await self._update(f"receiving policy {version}", "/dppo/receive_weights", source, version, mode)

    async def _update(self, action: str, path: str, source: dict[str, Any], version: int, mode: UpdateMode) -> float:
        body = {
            **source,
            "version": int(version),
            "mode": mode,
            "wait_s": 0.9 * self._update_timeout_s,  # the server times out first, so that its error has the reason
        }
        reply = await self._calls.json(action, path, self._update_timeout_s, body=body)
        if reply.get("version") != version:
            raise EngineError(f"engine {self.url}: {action}: the reply has version {reply.get('version')}")
        paused_s = reply.get("paused_s")
        return paused_s if isinstance(paused_s, float) else 0.0

    async def weights_fingerprint(self) -> Fingerprint:
        action = "fingerprints of its weights"
        reply = await self._calls.json(action, "/dppo/fingerprint", self._update_timeout_s)
        return self._fingerprint(reply.get("workers"))

    async def sleep(self) -> None:
        await self._calls.call("going to sleep", "/dppo/sleep", self._update_timeout_s, body={})

    async def wake(self) -> None:
        await self._calls.call("waking up", "/dppo/wake", self._update_timeout_s, body={})

    async def info(self) -> EngineInfo:
        reply = await self._calls.json("its description", "/dppo/info")
        try:
            return EngineInfo(**{**reply, "problems": tuple(reply["problems"])})
        except (KeyError, TypeError) as error:
            raise EngineIncompatible(f"engine {self.url}: its description is of another version: {error}") from error

    async def health(self) -> None:
        await self._calls.call("health", "/health", CONTROL_TIMEOUT_S, retry_busy=False)

    async def abort(self, request_id: str) -> None:
        body = {"request_id": request_id + self._suffix}
        await self._calls.call(f"abort of {request_id}", "/dppo/abort", CONTROL_TIMEOUT_S, body=body)

    def _decode(self, action: str, reply: bytes | bytearray) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        try:
            return decode_reply(reply)
        except ValueError as error:
            raise InvalidSample(f"engine {self.url}: {action}: garbled reply: {error}") from error
