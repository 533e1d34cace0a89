"""Record in the worker which experts each token was routed to, and collect the records in the API process.

On GPUs vLLM records the experts itself (`--enable-return-routed-experts`, which needs a model runner that CPUs lack).
Then the worker uses only `moe_layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.engine.protocol import EngineClient
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.outputs import CompletionOutput

from dppo_megatron.rollout.engines.samples import absent_experts

RECORDED = "/experts"
"""Suffix of request ids. The experts of requests with this suffix are recorded."""


def moe_layers(model: torch.nn.Module) -> list[tuple[int, MoERunner]]:
    """Return (number, module) for every layer of `model` that has experts, in order."""
    layers = [(module.layer_id, module) for module in model.modules() if isinstance(module, MoERunner)]
    return sorted(layers, key=lambda layer: layer[0])


class ExpertRecorder:
    """Records, in a worker, the routing in every step of `runner`, vLLM's V1 model runner, by request and position.

    If a preempted request computes a position again, the first record is kept, because the next token was sampled under
    that routing.
    """

    def __init__(self, runner: Any, num_experts: int):
        self._runner = runner
        self._dtype = np.uint8 if num_experts <= 256 else np.uint16
        self._step: list[torch.Tensor] = []  # [tokens, k] of each layer in the running step
        self._records: dict[str, list[np.ndarray]] = {}  # request id -> consecutive [tokens, L, k]
        layers = moe_layers(runner.model)
        self._num_layers = len(layers)
        for _, module in layers:
            module.router.set_capture_fn(self._step.append)
        runner.execute_model = partial(self._execute, runner.execute_model)

    def take(self, request_id: str) -> np.ndarray | None:
        """Remove and return the record [tokens, L, k] of a finished request. Returns None if it had no step."""
        parts = self._records.pop(request_id, None)
        return None if parts is None else np.concatenate(parts)

    def _execute(self, execute: Callable[..., Any], scheduler_output: Any, *arguments: Any, **options: Any) -> Any:
        self._step.clear()
        result = execute(scheduler_output, *arguments, **options)
        scheduled = scheduler_output.num_scheduled_tokens
        if any(name_of(request_id).endswith(RECORDED) for request_id in scheduled):
            self._record(scheduled)
        return result

    def _record(self, scheduled: dict[str, int]) -> None:
        if len(self._step) != self._num_layers:
            raise RuntimeError(f"recorded the experts of {len(self._step)} layers, expected {self._num_layers}")
        experts = torch.stack(self._step, dim=1).numpy().astype(self._dtype)
        batch = self._runner.input_batch
        row = 0
        for index, request_id in enumerate(batch.req_ids):
            count = scheduled[request_id]
            name = name_of(request_id)
            if name.endswith(RECORDED):
                parts = self._records.setdefault(name, [])
                num_recorded = sum(map(len, parts)) - int(batch.num_computed_tokens_cpu[index])
                if num_recorded < 0:
                    raise RuntimeError(
                        f"request {request_id}: the experts of {-num_recorded} earlier positions are missing"
                    )
                if num_recorded < count:
                    parts.append(experts[row + num_recorded : row + count])
            row += count


class ExpertsReader:
    """Returns, in the API process, the experts of finished samples from vLLM's outputs or the workers' recorders."""

    def __init__(self, engine: EngineClient, config: VllmConfig):
        self._engine = engine
        # vLLM stores the experts of every cached block under the block hash, and drops both when the cache is reset, as
        # after every update (vllm/distributed/aux_output_connector). Our recorder has no experts for positions that
        # vLLM takes from the prefix cache.
        self.native = config.aux_output_config.enabled
        records = config.device_config.device_type == "cpu" and not config.use_v2_model_runner
        self.available = config.speculative_config is None and (self.native or (config.model_config.is_moe and records))
        self._layers: list[int] = []
        self._k = config.model_config.get_num_experts_per_tok() if self.available else 0

    async def start(self) -> None:
        """Start recording. Call it before the first request, if `available`."""
        method = "dppo_moe_layers" if self.native else "dppo_record_experts"
        self._layers = (await self._engine.collective_rpc(method))[0]

    async def read(self, samples: Sequence[CompletionOutput], names: Sequence[str], prompt_tokens: int) -> np.ndarray:
        """Return experts [sum of P + R - 1, L, k], uint8 or uint16, for prompt and response of every sample end to end.

        The last token of a sample has no row. Example: prompts of 3 tokens with responses of 2 and 4 tokens give 4 + 6
        rows.
        """
        if self.native:
            parts = [None if s.routed_experts is None else s.routed_experts[:, self._layers] for s in samples]
        else:
            parts = await self._take(names)
        absent = absent_experts(prompt_tokens, len(self._layers), self._k)
        return np.concatenate(
            [
                absent if part is None or not sample.token_ids else part[: prompt_tokens + len(sample.token_ids) - 1]
                for sample, part in zip(samples, parts, strict=True)
            ]
        )

    async def forget(self, names: Sequence[str]) -> None:
        """Drop the records of samples that will not be read."""
        if not self.native:
            await self._take(names)

    async def _take(self, names: Sequence[str]) -> list[np.ndarray | None]:
        records = (await self._engine.collective_rpc("dppo_take_experts", args=(list(names),)))[0]
        return [None if t is None else np.frombuffer(t[0], dtype=t[1]).reshape(t[2]) for t in records]


def name_of(request_id: str) -> str:
    """Return the id that a request was sent with, without the random part that vLLM appends."""
    return request_id.rpartition("-")[0]
