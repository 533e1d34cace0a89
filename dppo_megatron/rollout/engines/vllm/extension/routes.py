"""Add HTTP routes under /dppo to a stock vLLM server: sample a group, score, swap weights, report the state.

vLLM loads this endpoint plug-in when VLLM_PLUGINS names `dppo_megatron`. It also puts `Guard` before every route of the
server: all but /health need the secret in DPPO_SECRET. Replies with arrays are safetensors (see `wire`); all others are
JSON. Errors are `{"error": text}` with a status:

- 400: the request was rejected, and nothing changed
- 401: the request lacks the secret
- 409: the served weights are incomplete
- 413: the request is too large
- 503: the server is paused or full; send the request again
- 504: running requests did not end in time
- 500: any other error
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from vllm import __version__ as vllm_version
from vllm.config import VllmConfig
from vllm.engine.protocol import EngineClient
from vllm.exceptions import GracefulHTTPError, RetryableRequestError, VLLMClientError

from dppo_megatron.rollout.engines.guard.asgi import SECRET_VARIABLE, Guard, inside_roots, roots_of_environment
from dppo_megatron.rollout.engines.protocol import GenerateRequest, check_ids
from dppo_megatron.rollout.engines.samples import parse_version
from dppo_megatron.weights.broadcast_plan import WeightGroupPlan
from dppo_megatron.weights.manifest import BadWeights

from .bodies import AbortBody, GenerateBody, LoadBody, ReceiveBody, ScoreBody, parse
from .drafts import has_drafts
from .experts import ExpertsReader
from .generation import child_ids, sample_group, score
from .sampling_masks import MaskReader
from .weights import WeightsInconsistent, WeightUpdater
from .wire import MEDIA_TYPE, encode_reply, encode_samples, encode_trace

log = logging.getLogger(__name__)

VERSION_VARIABLE = "DPPO_POLICY_VERSION"
"""Environment variable: policy version of the start weights."""

Result = TypeVar("Result")


class ClientGone(Exception):
    """The client closed the connection."""


class DppoRoutes:
    """Adds the routes. vLLM creates one instance per API process."""

    name = "dppo_megatron"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._running: dict[str, GenerateRequest] = {}
        self._tracing = asyncio.Lock()
        self._instance = uuid4().hex  # identifies this server process; a restart changes it
        # `init_state` sets these before the first request.
        self._engine: EngineClient
        self._updater: WeightUpdater
        self._experts: ExpertsReader
        self._masks: MaskReader
        self._drafts: bool

    def attach_router(self, app: FastAPI) -> None:
        for path, handler, method in (
            ("/dppo/info", self._info, "GET"),
            ("/dppo/generate", self._generate, "POST"),
            ("/dppo/score", self._score, "POST"),
            ("/dppo/trace", self._trace, "POST"),
            ("/dppo/abort", self._abort, "POST"),
            ("/dppo/load_weights", self._load_weights, "POST"),
            ("/dppo/join_weight_group", self._join_weight_group, "POST"),
            ("/dppo/receive_weights", self._receive_weights, "POST"),
            ("/dppo/fingerprint", self._fingerprint, "GET"),
            ("/dppo/sleep", self._sleep, "POST"),
            ("/dppo/wake", self._wake, "POST"),
        ):
            app.add_api_route(path, _reporting_errors(handler), methods=[method], response_class=Response)
        # vLLM's API key guards only /v1.
        app.add_middleware(Guard, secret=os.environ.get(SECRET_VARIABLE, ""), open_paths=("/health",))

    async def init_state(self, engine_client: EngineClient | None, state: Any, args: Any) -> None:
        if engine_client is None:
            return
        self._engine = engine_client
        version = int(os.environ.get(VERSION_VARIABLE) or -1)
        adapters = engine_client.vllm_config.lora_config is not None
        self._updater = WeightUpdater(engine_client, Path(engine_client.model_config.model), version, adapters=adapters)
        self._experts = ExpertsReader(engine_client, engine_client.vllm_config)
        if self._experts.available:
            await self._experts.start()
        self._masks = MaskReader(engine_client, engine_client.vllm_config)
        if self._masks.available:
            await self._masks.start()
        self._drafts = has_drafts(engine_client.vllm_config)
        if self._drafts:
            await engine_client.collective_rpc("dppo_draft")
        if version >= 0:
            await engine_client.update_weight_version(str(version))

    async def _info(self, request: Request) -> Response:
        config, parallel = self._engine.model_config, self._engine.vllm_config.parallel_config
        updating_s, version = self._updater.updating_s, self._updater.version
        if updating_s is None:  # during an update the engine core does not answer; a frozen core fails here
            version = parse_version(await _unless_gone(request, self._engine.get_weight_version()))
        return JSONResponse(
            {
                "version": version,
                "updating_s": updating_s,
                "vocab_size": config.get_vocab_size(),
                "max_model_len": config.max_model_len,
                "max_logprobs": config.max_logprobs,
                "logprobs_mode": str(config.logprobs_mode),
                "dtype": str(config.dtype).removeprefix("torch."),
                "model": str(config.model),
                "engine": f"vllm {vllm_version}",
                "running": len(self._running),
                "workers": parallel.world_size,
                "weight_group": self._updater.group,
                "routed_experts": self._experts.available,
                "sampling_mask": self._masks.available,
                "problems": _unfit_settings(self._engine.vllm_config),
                "instance": self._instance,
            }
        )

    async def _generate(self, request: Request) -> Response:
        group = parse(GenerateBody, await request.body()).request()
        self._updater.check_consistent()
        group = self._admit(group)
        try:
            work = sample_group(self._engine, group, self._experts, self._masks, self._updater.adapter, self._drafts)
            samples = await _unless_gone(request, work)
        finally:
            del self._running[group.request_id]
        header = {"request_id": group.request_id, "instance": self._instance}
        return Response(encode_samples(header, samples), media_type=MEDIA_TYPE)

    def _admit(self, group: GenerateRequest) -> GenerateRequest:
        config = self._engine.model_config
        group = group.within(config.get_vocab_size())
        if group.request_id in self._running:
            raise ValueError(f"request id {group.request_id!r} is already running")
        cap = min(config.max_logprobs, config.get_vocab_size()) if config.max_logprobs >= 0 else config.get_vocab_size()
        if group.topk > cap:
            raise ValueError(
                f"topk = {group.topk}: this server returns at most {cap} log-probs a token (--max-logprobs)"
            )
        if group.routed_experts and not self._experts.available:
            raise ValueError(
                "routed_experts = true: this server records none; it needs a mixture of experts and, on GPUs, "
                "--enable-return-routed-experts"
            )
        if group.sampling_mask and not self._masks.available:
            raise ValueError(
                "sampling_mask = true: this server does not record which tokens top_p, top_k and min_p left; it needs "
                "--logprobs-mode processed_logprobs and, on GPUs, --return-sampling-mask"
            )
        if self._masks.native and group.temperature and not group.top_k and not group.scored:
            raise ValueError(
                "top_k = 0: a server with --return-sampling-mask lists the tokens left at every position of every "
                "request; bound them by top_k"
            )
        self._running[group.request_id] = group
        return group

    async def _score(self, request: Request) -> Response:
        token_ids = np.asarray(parse(ScoreBody, await request.body()).token_ids, dtype=np.int32)
        self._updater.check_consistent()
        if len(token_ids) < 2:
            raise ValueError("token_ids: scoring needs a vector of at least two tokens")
        check_ids(token_ids, self._engine.model_config.get_vocab_size())
        scored = f"score-{uuid4().hex}"
        work = score(self._engine, token_ids, scored, self._masks, self._updater.adapter)
        samples = await _unless_gone(request, work)
        return Response(encode_reply({}, {"logprobs": samples.columns["rollout_logprob"]}), media_type=MEDIA_TYPE)

    async def _trace(self, request: Request) -> Response:
        token_ids = parse(ScoreBody, await request.body()).token_ids
        self._updater.check_consistent()
        check_ids(np.asarray(token_ids, dtype=np.int32), self._engine.model_config.get_vocab_size())
        traced = f"trace-{uuid4().hex}"
        async with self._tracing:
            await self._engine.collective_rpc("dppo_start_trace", args=(token_ids,))
            try:
                work = score(self._engine, np.asarray(token_ids), traced, self._masks, self._updater.adapter)
                samples = await _unless_gone(request, work)
            finally:
                workers = await self._engine.collective_rpc("dppo_take_trace")
        return Response(encode_trace(samples.columns["rollout_logprob"], workers), media_type=MEDIA_TYPE)

    async def _abort(self, request: Request) -> Response:
        group = self._running.get(parse(AbortBody, await request.body()).request_id)
        if group is not None:
            await self._engine.abort(child_ids(group))
        return JSONResponse({"aborted": group.n if group is not None else 0})

    async def _load_weights(self, request: Request) -> Response:
        body = parse(LoadBody, await request.body())
        roots = (*roots_of_environment(), str(self._engine.model_config.model))
        path = Path(await asyncio.to_thread(inside_roots, body.path, roots))
        seconds = await self._updater.load(path, body.version, body.mode, body.wait_s, body.read_ahead_bytes)
        return JSONResponse({"version": body.version, "paused_s": seconds, "parts": await self._updater.parts()})

    async def _join_weight_group(self, request: Request) -> Response:
        plan = parse(WeightGroupPlan, await request.body())
        await self._updater.join(plan)
        return JSONResponse({"weight_group": plan.name})

    async def _receive_weights(self, request: Request) -> Response:
        body = parse(ReceiveBody, await request.body())
        seconds = await self._updater.receive(body.group, body.step, body.version, body.mode, body.wait_s)
        return JSONResponse({"version": body.version, "paused_s": seconds})

    async def _fingerprint(self, request: Request) -> Response:
        self._updater.check_consistent()
        return JSONResponse({"workers": await self._engine.collective_rpc("dppo_fingerprint")})

    async def _sleep(self, request: Request) -> Response:
        await self._updater.sleep()
        return JSONResponse({"sleeping": True})

    async def _wake(self, request: Request) -> Response:
        await self._updater.wake()
        return JSONResponse({"sleeping": False})


def _unfit_settings(config: VllmConfig) -> list[str]:
    problems = []
    if config.device_config.device_type == "cpu" and config.scheduler_config.enable_chunked_prefill:
        problems.append(
            "a seeded request whose prompt is split over two steps ends a CPU engine; start it with "
            "--no-enable-chunked-prefill and --max-num-batched-tokens of at least --max-model-len"
        )
    if config.parallel_config.data_parallel_size > 1:
        problems.append(
            "vLLM reports only the answer of the first of its data-parallel replicas, so a weight update that failed "
            "in another would not be noticed; start one server for each replica instead of --data-parallel-size"
        )
    speculative = config.speculative_config
    if speculative is not None and speculative.rejection_sample_method == "synthetic":
        problems.append(
            "it accepts drafts at a given rate (rejection_sample_method = synthetic), so samples do not follow their "
            "log-probs; start it without --speculative-config"
        )
    elif speculative is not None and not has_drafts(config):
        problems.append(
            f"speculative decoding ({speculative.method}) draws other tokens for a seed; start it without "
            "--speculative-config, or with that of engine.draft_tokens"
        )
    elif speculative is not None and config.device_config.device_type != "cpu":
        problems.append("drafts have not been run on GPUs (engine.draft_tokens); start it without --speculative-config")
    if config.model_config.runner_type != "generate":
        problems.append(f"it runs the model as {config.model_config.runner_type}; start it with --runner generate")
    return problems


def _reporting_errors(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def reporting(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientGone:
            return Response(status_code=499)
        except (BadWeights, VLLMClientError, ValueError) as error:
            return _error(400, error)
        except WeightsInconsistent as error:
            return _error(409, error)
        except (RetryableRequestError, GracefulHTTPError) as error:  # from 0.33 on, a pause rejects requests
            return _error(503, error)
        except TimeoutError:
            return _error(504, TimeoutError("running requests did not end in time; the old weights stay in use"))
        except Exception as error:
            log.exception("%s failed", request.url.path)
            return _error(500, error)

    return reporting


def _error(status: int, error: BaseException) -> Response:
    return JSONResponse({"error": f"{error}" or type(error).__name__}, status_code=status)


async def _unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """Return the result of `work`. If the client disconnects, cancel `work`, which aborts it in the engine.

    The body must have been read, or be empty, so that the next message is the disconnect.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
