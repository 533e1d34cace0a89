"""vLLM's scheduler and worker connector without a model. Imported by its test, because vLLM's modules take seconds."""

import json
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig
from vllm.config.aux_output import AuxOutputConfig
from vllm.distributed.aux_output_connector import worker as worker_side
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests.support.models import CONFIGS

BLOCK, BLOCKS, PROMPT, RESPONSE = 16, 100, 40, 24
ROW = (1, 2)  # layers, experts of a token
SCHEDULERS = {1: Scheduler, 2: AsyncScheduler}  # by the most steps in flight


class Engine:
    """vLLM's scheduler and worker connector, with up to `in_flight` steps under way."""

    def __init__(self, config: VllmConfig, in_flight: int):
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        cache = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
        self.scheduler = SCHEDULERS[in_flight](config, cache, StructuredOutputManager(config), BLOCK)
        self.worker = worker_side.AuxOutputWorkerConnector(
            vllm_config=config, model=torch.nn.Module(), kv_cache_config=cache
        )
        self.weights, self.chunks, self.finished = 0, {}, set()
        self._in_flight, self._steps = in_flight, deque()

    def add(self, name: str, prompt: list[int]) -> None:
        params = SamplingParams(max_tokens=RESPONSE, ignore_eos=True)
        self.scheduler.add_request(Request(name, prompt, params, None, block_hasher=_hasher()))
        self.chunks[name] = []

    def step(self) -> None:
        scheduled = self.scheduler.schedule()
        if scheduled.total_num_scheduled_tokens:
            self._steps.append((scheduled, *self._execute(scheduled)))
        if len(self._steps) >= self._in_flight or not scheduled.total_num_scheduled_tokens:
            self._take_output()

    def update_weights(self) -> None:
        """Pause as the engine core does in mode keep: the pause is complete when no step is in flight."""
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while self._steps:
            self._take_output()
        self.weights += 1
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True)
        self.scheduler.set_pause_state(PauseState.UNPAUSED)

    def routes(self, name: str) -> np.ndarray:
        return np.concatenate(self.chunks[name])[:, 0]

    def _execute(self, scheduled):
        cached = scheduled.scheduled_cached_reqs
        starts = {request.req_id: request.num_computed_tokens for request in scheduled.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        counts = scheduled.num_scheduled_tokens
        ends = {name: starts[name] + count for name, count in counts.items()}
        rows = [[self.weights, position] for name in counts for position in range(starts[name], ends[name])]
        rows = torch.tensor(rows, dtype=torch.uint8).reshape(-1, *ROW)
        self.worker._capturer.snapshot_routing_data = lambda num_rows: rows[:num_rows]
        self.worker.begin_step(scheduled.aux_output_connector_metadata)
        sampled = np.array([ends[name] >= self.scheduler.requests[name].num_tokens for name in counts], np.int32)
        batch = SimpleNamespace(
            req_ids=list(counts),
            query_start_loc_np=np.cumsum([0, *counts.values()]),
            num_computed_tokens_np=np.array([starts[name] for name in counts]),
        )
        pending = self.worker.prepare_output(batch)
        pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
        return pending, sampled

    def _take_output(self) -> None:
        scheduled, pending, sampled = self._steps.popleft()
        names = list(scheduled.num_scheduled_tokens)
        output = ModelRunnerOutput(
            names,
            {name: index for index, name in enumerate(names)},
            [[7] if some else [] for some in sampled],
            aux_output_connector_output=pending.process_output(),
        )
        for outputs in self.scheduler.update_from_output(scheduled, output).values():
            for each in outputs.outputs:
                # As vLLM's OutputProcessor does, which joins them when the request ends.
                self.chunks[each.request_id].append(each.routed_experts)
                if each.finish_reason is not None:
                    self.finished.add(each.request_id)


def _hasher():
    init_none_hash(sha256)
    return get_request_block_hasher(BLOCK, sha256)


def make_config(directory: Path, monkeypatch: pytest.MonkeyPatch) -> VllmConfig:
    capturer = SimpleNamespace(shape_per_token=ROW, output_dtype_name="uint8")
    monkeypatch.setattr(worker_side, "RoutedExpertsCapturer", lambda **_: capturer)
    monkeypatch.setattr(worker_side, "bind_routed_experts_capturer", lambda model, capturer: None)
    monkeypatch.setattr(worker_side, "get_tp_group", lambda: SimpleNamespace(is_first_rank=True))
    (directory / "config.json").write_text(json.dumps(CONFIGS["qwen3_moe"] | {"model_type": "qwen3_moe"}))
    arguments = EngineArgs(str(directory), skip_tokenizer_init=True, block_size=BLOCK, max_model_len=64)
    config = arguments.create_engine_config()
    # Afterwards: vLLM accepts it only for its GPU model runner.
    config.aux_output_config = AuxOutputConfig(enable_return_routed_experts=True)
    config.scheduler_config.max_num_batched_tokens = 64  # the second prompt is split over two steps
    config.scheduler_config.enable_chunked_prefill = True
    config.cache_config.num_gpu_blocks = BLOCKS
    return config
