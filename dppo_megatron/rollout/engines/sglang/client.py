"""Call an SGLang server as an `Engine`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from dppo_megatron.config import Config
from dppo_megatron.hf import HFModelConfig, ModelError, read_hf_config
from dppo_megatron.rollout.engines.byte_budget import ByteBudget, ReplySlot
from dppo_megatron.rollout.engines.client import check_info
from dppo_megatron.rollout.engines.http import REQUEST_TIMEOUT_REMEDY, decoded
from dppo_megatron.rollout.engines.protocol import (
    EngineError,
    EngineIncompatible,
    EngineInfo,
    EngineRefused,
    EngineTimeout,
    GenerateRequest,
    InvalidSample,
    check_ids,
)
from dppo_megatron.rollout.engines.samples import GroupSamples, check_scores
from dppo_megatron.rollout.engines.trace import Trace
from dppo_megatron.types import Rollout
from dppo_megatron.weights.fingerprint import Fingerprint

from .plugin.dppo_sglang_plugin import FINGERPRINT, MISSING, START_TRACE, TAKE_TRACE
from .weights import UPDATING, SglangWeights
from .wire import (
    ASLEEP,
    EMPTY,
    child_ids,
    decode_group,
    decode_score,
    decode_trace,
    encode_group,
    encode_score,
    reported_version,
)


class SglangEngine(SglangWeights):
    """Calls a server over HTTP.

    The server does not limit K, exits when a token id is outside the vocabulary, and loads any weights it is given. So
    the client first checks requests and weight directories against `config` and the files of the start model.
    """

    def __init__(self, config: Config, url: str, budget: ByteBudget | None = None):
        super().__init__(config, url, budget)
        self._model_path = config.model.path
        self._max_logprobs = config.engine.max_logprobs
        self._seeded = config.engine.seeded
        self._running: dict[str, GenerateRequest] = {}  # request id -> request that was sent to the server
        self._last_info: EngineInfo | None = None  # result of the last `info`
        self._update: tuple[str, float] | None = None  # label of the running update, and when this client first saw it
        self._tracing = asyncio.Lock()

    async def generate(self, request: GenerateRequest) -> tuple[Rollout, ...]:
        action = f"generation of group {request.request_id}"
        limits = await self._static_info()
        self._admit(action, request, limits)
        await self._check_not(action, ASLEEP, EMPTY)
        longest = limits.max_model_len - len(request.token_ids)
        # Every attempt has a new id, because the server may still be ending a request with a closed connection.
        sent = dataclasses.replace(request, request_id=f"{request.request_id}~{uuid4().hex[:8]}")
        scored = encode_score(request.token_ids.tolist(), request.topk)
        body = scored if request.scored else encode_group(sent, min(request.max_tokens, longest))
        self._running[request.request_id] = sent
        with ReplySlot(self._budget) as slot:
            try:
                reply = await self._calls.call(
                    action,
                    "/generate",
                    self._generate_timeout_s,
                    body=body,
                    timeout_remedy=REQUEST_TIMEOUT_REMEDY,
                    slot=slot,
                )
            except (asyncio.CancelledError, EngineTimeout):
                with contextlib.suppress(EngineError):
                    await self.abort(request.request_id)  # the server does not notice the disconnection at once
                raise
            finally:
                del self._running[request.request_id]
            try:
                samples = await decoded(self._decode_samples, reply, request, sent, limits)
            except (ValueError, InvalidSample) as error:
                raise InvalidSample(f"engine {self.url}: {action}: {error}") from None
        return samples.rollouts(len(request.token_ids))

    def _decode_samples(
        self, reply: bytes | bytearray, request: GenerateRequest, sent: GenerateRequest, limits: EngineInfo
    ) -> GroupSamples:
        if sent.scored:
            samples = decode_score(reply, sent.token_ids.tolist(), limits.vocab_size, sent.topk)
        else:
            samples = decode_group(reply, sent, self._model[0])
        samples.check(request, vocab_size=limits.vocab_size, max_model_len=limits.max_model_len)
        return samples

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        action = f"scoring of {len(token_ids)} tokens"
        limits = await self._static_info()
        token_ids = np.asarray(token_ids)
        if token_ids.ndim != 1 or len(token_ids) < 2:
            raise EngineRefused(f"engine {self.url}: {action}: scoring needs a vector of at least two tokens")
        self._check_ids(action, token_ids, limits.vocab_size)
        await self._check_not(action, ASLEEP, EMPTY)
        tokens = token_ids.tolist()
        reply = await self._calls.call(action, "/generate", self._generate_timeout_s, body=encode_score(tokens))
        try:
            columns = decode_score(reply, tokens, limits.vocab_size).columns
        except ValueError as error:
            raise InvalidSample(f"engine {self.url}: {action}: {error}") from None
        if columns["versions"][0] < 0:
            raise EngineError(f"engine {self.url}: {action}: its weights are incomplete, load them again")
        return check_scores(f"engine {self.url}: {action}", columns["rollout_logprob"], len(tokens) - 1)

    async def trace(self, token_ids: np.ndarray) -> tuple[Trace, np.ndarray]:
        action = f"recording the pass of {len(token_ids)} tokens"
        ids = " ".join(map(str, np.asarray(token_ids).tolist()))
        async with self._tracing:
            await self._ask_plugin(action, f"{START_TRACE} {ids}")
            try:
                logprobs = await self.score(token_ids)
            finally:
                reports = await self._ask_plugin(action, TAKE_TRACE, self._generate_timeout_s)
        return self._joined(action, lambda: [decode_trace(worker) for worker in reports]), logprobs

    async def weights_fingerprint(self) -> Fingerprint:
        action = "fingerprints of its weights"
        await self._check_not(action, ASLEEP, EMPTY)
        reports = await self._ask_plugin(action, FINGERPRINT, self._update_timeout_s)
        workers = [
            {group: None if value == MISSING else value.split() for group, value in rank.items()} for rank in reports
        ]
        return self._fingerprint(workers)

    async def info(self) -> EngineInfo:
        action = "its description"
        model, _ = await asyncio.to_thread(lambda: self._model)
        served = await self._calls.json(action, "/model_info")
        updating_s = self._updating_s(served)
        if updating_s is not None and self._last_info is not None:
            return dataclasses.replace(self._last_info, updating_s=updating_s, weight_group=self._weight_group)
        server = await self._calls.json(action, "/server_info")
        try:
            self._last_info = EngineInfo(
                version=reported_version(served["weight_version"]),
                vocab_size=_vocab_size(Path(served["model_path"]), self._model_path),
                max_model_len=server["max_req_input_len"] - 2,
                max_logprobs=self._max_logprobs,
                logprobs_mode="processed_logprobs",
                dtype=server["dtype"],
                model=served["model_path"],
                engine=f"sglang {server['version']}",
                running=sum(sent.n for sent in self._running.values()),
                routed_experts=bool(server["enable_return_routed_experts"]),
                sampling_mask="sampling_mask_max_tokens" in server,
                problems=tuple(_unfit_settings(server, model, self._seeded, self._adapters is not None)),
                workers=server["tp_size"],
                weight_group=self._weight_group,
                updating_s=updating_s,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise EngineIncompatible(f"engine {self.url}: its description is not SGLang's: {error}") from error
        return self._last_info

    def _updating_s(self, served: dict[str, Any]) -> float | None:
        """Return for how many seconds this client has seen the running update, or None without an update.

        The scheduler does not answer during an update.
        """
        label = served.get("weight_version", "")
        if not label.startswith(UPDATING):
            self._update = None
            return None
        if self._update is None or self._update[0] != label:
            self._update = (label, time.monotonic())
        return time.monotonic() - self._update[1]

    async def health(self) -> None:
        # The scheduler answers /server_info also between the steps of long requests and while paused. /health would
        # sample a token, take a second, and fail while paused.
        if self._updating_s(await self._calls.json("health", "/model_info", retry_busy=False)) is not None:
            return
        await self._calls.json("health", "/server_info", retry_busy=False)

    async def abort(self, request_id: str) -> None:
        sent = self._running.get(request_id)
        children = child_ids(sent.request_id, sent.n) if sent else []
        action = f"abort of {request_id}"
        await asyncio.gather(*(self._calls.call(action, "/abort_request", body={"rid": child}) for child in children))

    async def check_compatible(self, config: Config, *, vocab_size: int | None = None) -> EngineInfo:
        info = dataclasses.replace(await self.info(), logprobs_mode=await self._logprobs_mode())
        check_info(self.url, info, config, vocab_size)
        return info

    async def _logprobs_mode(self) -> str:
        """Measure the log-prob mode, because the server does not report it.

        Doubling the temperature halves the distance between the two most likely tokens, unless log-probs ignore the
        temperature.
        """
        limits = await self._static_info()
        prompt = np.arange(1, min(9, limits.vocab_size))  # token 0 is often padding with equal logits
        distance = []
        for temperature in (1.0, 2.0):
            request = GenerateRequest(f"temperature-{uuid4().hex}", prompt, 1, (0,), temperature, 1, topk=2)
            (rollout,) = await self.generate(request)
            first, second = rollout.columns["rollout_topk_logprob"][0]
            distance.append(float(first - second))
        return "raw_logprobs" if distance[1] > 0.75 * distance[0] else "processed_logprobs"

    def _admit(self, action: str, request: GenerateRequest, limits: EngineInfo) -> None:
        """Raise `EngineRefused` for a request that would end the server, or get samples that do not answer it."""
        cap = min(limits.max_logprobs, limits.vocab_size)
        extra = self._model[1] - set(request.stop_token_ids)
        problems = [
            (request.request_id in self._running, "a request of that id is already running"),
            (
                request.topk > cap,
                f"topk = {request.topk}: this engine returns at most {cap} log-probs a token (engine.max_logprobs)",
            ),
            (
                len(request.token_ids) >= limits.max_model_len,
                f"a prompt of {len(request.token_ids)} tokens leaves no room in sequences of {limits.max_model_len} "
                "(engine.max_model_len)",
            ),
            (
                bool(request.stop_token_ids and extra),
                f"SGLang also stops at the model's own end tokens {sorted(extra)}; add them to rollout.stop_token_ids",
            ),
            (
                bool(request.min_p) and self._seeded,
                "SGLang draws with seeds or with min_p, and exits if a request has both; set engine.seeded to "
                "false, or rollout.min_p to 0",
            ),
            (
                request.routed_experts and not limits.routed_experts,
                "this server was not started with --enable-return-routed-experts (rollout.routing_replay)",
            ),
        ]
        for is_wrong, message in problems:
            if is_wrong:
                raise EngineRefused(f"engine {self.url}: {action}: {message}")
        self._check_ids(action, request.token_ids, limits.vocab_size)

    def _check_ids(self, action: str, token_ids: np.ndarray, vocab_size: int) -> None:
        try:
            check_ids(token_ids, vocab_size)
        except ValueError as error:
            raise EngineRefused(f"engine {self.url}: {action}: {error}") from None

    @cached_property
    def _model(self) -> tuple[HFModelConfig, frozenset[int]]:
        """Return the run's model, and the end tokens from both config files. SGLang ends a response at these tokens."""
        from dppo_megatron.data.tokenizer import read_json

        model = read_hf_config(self._model_path)
        eos_token_id = read_json(self._model_path / "generation_config.json").get("eos_token_id")
        ends = eos_token_id if isinstance(eos_token_id, list) else [] if eos_token_id is None else [eos_token_id]
        return model, frozenset({*model.eos_token_ids, *ends})


def _vocab_size(served: Path, model_path: Path) -> int:
    """Read the vocabulary size from the served model's files, because SGLang does not report it.

    If this machine cannot read them, return the vocabulary size of the run's model.
    """
    try:
        return read_hf_config(served).vocab_size
    except ModelError:
        return read_hf_config(model_path).vocab_size


def _unfit_settings(server: dict[str, Any], model: HFModelConfig, seeded: bool, adapters: bool) -> list[str]:
    problems = []
    if adapters and not server["enable_lora"]:
        problems.append(
            "it loads no adapter (weight_sync.lora = adapter); start it with --enable-lora, --max-lora-rank and "
            "--lora-target-modules"
        )
    if server["enable_lora"] and not adapters:
        problems.append("it loads only adapters; start it without --enable-lora, or set weight_sync.lora")
    if model.family == "qwen3_moe" and model.tied_embeddings:
        problems.append(
            "SGLang does not initialize the head of a Qwen3-MoE with tied embeddings; store lm_head.weight and set "
            "tie_word_embeddings to false in the model's config.json"
        )
    if model.family == "qwen3_moe" and not all(map(model.is_moe_layer, range(model.num_layers))):
        problems.append(
            "SGLang creates experts in every layer of a Qwen3-MoE, and does not initialize those of the model's dense "
            "layers (mlp_only_layers, decoder_sparse_step); use engine.kind = vllm"
        )
    if seeded and not server["enable_deterministic_inference"]:
        problems.append(
            "samples ignore their seeds; start it with --enable-deterministic-inference, or set engine.seeded to false"
        )
    if not server["skip_tokenizer_init"]:
        problems.append("the tokenizer's end token would stop responses; start it with --skip-tokenizer-init")
    if server["speculative_algorithm"]:
        problems.append(f"speculative decoding ({server['speculative_algorithm']}) draws differently; start it without")
    if server["preferred_sampling_params"]:
        problems.append("it adds its own sampling settings; start it without --preferred-sampling-params")
    return problems
