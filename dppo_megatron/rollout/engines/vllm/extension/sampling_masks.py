"""Record the sampling mask of each position in the worker, and collect the masks in the API process.

A mask has the tokens that top-p, top-k and min-p left. On GPUs vLLM returns masks itself (`--return-sampling-mask`,
which needs a model runner that CPUs lack). Either way a mask has the finite entries of the distribution that vLLM drew
from (vLLM 0.32: temperature, then min-p, top-k, top-p). Masks are never computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.engine.protocol import EngineClient
from vllm.outputs import CompletionOutput

from .experts import name_of

RECORDED = "dppo_sampling_masks"
"""Key in a request's `extra_args` that asks for sampling masks."""

Masks = tuple[np.ndarray, np.ndarray]  # (ids end to end, number of ids at each position), both int32


class MaskRecorder:
    """Records, in a worker, the sampling mask of each draw by `runner`, vLLM's V1 model runner.

    A record belongs to a request and a position. If a preempted request draws a position again, the last record is
    kept, because the engine uses the last draw too.
    """

    def __init__(self, runner: Any):
        self._runner = runner
        self._records: dict[str, dict[int, np.ndarray]] = {}  # request id -> position in the sequence -> ids
        runner.sampler.sample = partial(self._sample, runner.sampler.sample)

    def take(self, request_id: str, first: int, tokens: int) -> Masks | None:
        """Return the masks at `tokens` positions from `first` in a finished request, and drop the record.

        Returns None if a position has no record. Example: masks [5, 7] and [2] give ids [5, 7, 2] and counts [2, 1].
        """
        record = self._records.pop(request_id, {})
        if any(position not in record for position in range(first, first + tokens)):
            return None
        return _flat([record[position] for position in range(first, first + tokens)])

    def _sample(self, sample: Callable[..., Any], logits: Any, *arguments: Any, **options: Any) -> Any:
        sampled, logprobs = sample(logits, *arguments, **options)
        batch = self._runner.input_batch
        # A position's number is the sequence length before it.
        positions = self._runner.optimistic_seq_lens_cpu[: batch.num_reqs].tolist()
        for row, (request_id, position) in enumerate(zip(batch.req_ids, positions, strict=True)):
            if (self._runner.requests[request_id].sampling_params.extra_args or {}).get(RECORDED):
                ids = torch.isfinite(logprobs[row]).nonzero().flatten()
                self._records.setdefault(name_of(request_id), {})[position] = ids.numpy().astype(np.int32)
        return sampled, logprobs


class MaskReader:
    """Returns, in the API process, the sampling masks of finished samples from vLLM's outputs or the recorders."""

    def __init__(self, engine: EngineClient, config: VllmConfig):
        self._engine = engine
        self.native = config.model_config.return_sampling_mask
        records = config.device_config.device_type == "cpu" and not config.use_v2_model_runner
        self.available = self.native or (
            records and config.speculative_config is None and config.model_config.logprobs_mode == "processed_logprobs"
        )

    async def start(self) -> None:
        """Start recording. Call it before the first request, if `available`."""
        if not self.native:
            await self._engine.collective_rpc("dppo_record_masks")

    async def read(self, samples: Sequence[CompletionOutput], names: Sequence[str], prompt_tokens: int) -> Masks:
        """Return the masks of all samples end to end. Raises RuntimeError if a sample's masks are incomplete."""
        if self.native:
            parts = [_native(sample) for sample in samples]
        else:
            parts = await self._take(names, prompt_tokens, [len(sample.token_ids) for sample in samples])
        complete = [part for part in parts if part is not None]
        if len(complete) < len(parts):
            raise RuntimeError(
                f"request {names[parts.index(None)]}: the sampling mask of some of its positions is missing"
            )
        return np.concatenate([ids for ids, _ in complete]), np.concatenate([counts for _, counts in complete])

    async def forget(self, names: Sequence[str]) -> None:
        """Drop the records of samples that will not be read."""
        if not self.native:
            await self._take(names, 0, [0] * len(names))

    async def _take(self, names: Sequence[str], prompt_tokens: int, lengths: Sequence[int]) -> list[Masks | None]:
        arguments = (list(names), prompt_tokens, list(lengths))
        records = (await self._engine.collective_rpc("dppo_take_masks", args=arguments))[0]
        return [None if t is None else (np.frombuffer(t[0], np.int32), np.frombuffer(t[1], np.int32)) for t in records]


def _native(sample: CompletionOutput) -> Masks | None:
    masks = [] if sample.sampling_mask is None else sample.sampling_mask.token_ids
    if len(masks) < len(sample.token_ids):
        return None
    return _flat([np.asarray(ids, np.int32) for ids in masks[: len(sample.token_ids)]])


def _flat(masks: list[np.ndarray]) -> Masks:
    return np.concatenate([np.empty(0, np.int32), *masks]), np.array([len(ids) for ids in masks], np.int32)
