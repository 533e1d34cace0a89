"""How a group ends on vLLM: its records are read or dropped, its errors reported, its log-probs made into columns."""

import asyncio
from types import SimpleNamespace
from unittest.mock import AsyncMock

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from vllm.engine.protocol import EngineClient
from vllm.exceptions import QueueOverflowError, RetryableRequestError
from vllm.logprobs import FlatLogprobs

from dppo_megatron.rollout.engines.http import EngineCalls
from dppo_megatron.rollout.engines.vllm.extension.experts import ExpertsReader
from dppo_megatron.rollout.engines.vllm.extension.generation import _columns, _flatten, _params, sample_group
from dppo_megatron.rollout.engines.vllm.extension.routes import _reporting_errors
from tests.support.engines import engine_config, group
from tests.support.fakes.http_server import against, http


def breaks(*_):
    raise RuntimeError("the worker does not answer")


async def waits(*_):
    await asyncio.sleep(60)


class Server:
    async def generate(self, *_, **__):
        yield SimpleNamespace(finished=True, outputs=[SimpleNamespace(token_ids=[1], logprobs=None)])


@pytest.mark.slow
@pytest.mark.parametrize(("read", "ends"), [(breaks, RuntimeError), (waits, asyncio.CancelledError)])
async def test_a_group_that_ends_while_its_experts_are_read_leaves_no_sampling_masks(read, ends):
    """The worker would keep them until its end."""
    experts, kept = (AsyncMock(native=False, **{"read.side_effect": each}) for each in (read, waits))
    request = group("lost", n=2, top_k=5, sampling_mask=True, experts=True)
    running = asyncio.create_task(sample_group(Server(), request, experts, kept, None))
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(ends):
        await running
    for told in (experts, kept):
        told.forget.assert_awaited_once_with([f"lost/{index}/experts" for index in range(request.n)])


@pytest.mark.parametrize("error", [RetryableRequestError("paused"), QueueOverflowError()])
def test_a_group_that_the_engine_rejects_for_now_is_sent_again(tmp_path, error):
    """vLLM 0.33 rejects new requests during a pause in modes wait and abort: one request is queued, the rest fail."""

    class Rejecting:
        async def generate(self, prompt, params, request_id, **_):
            if request_id.endswith("/1"):
                raise error
            await asyncio.sleep(60)
            yield

    async def route(_):
        await sample_group(Rejecting(), group("g", n=3), None, SimpleNamespace(native=False), None)

    async def send(engine):
        calls = EngineCalls(engine.url, None, "")
        try:
            return await calls.json("a request", "/route", 5.0)
        finally:
            await calls.close()

    rejected = asyncio.run(_reporting_errors(route)(None))
    replies = [http(rejected.status_code, rejected.body)] * 2 + [http(200, b"{}")]
    assert against(engine_config(tmp_path / "model"), {"/route": replies}, send) == {}


def flat(*ids: int) -> FlatLogprobs:
    """K = 1: each position has the sampled token and the most likely one."""
    made = FlatLogprobs()
    for token in ids:
        made.append_fast([token, 9], [-1.0, -0.5], [2, 1], [None, None])
    return made


def test_log_probs_of_samples_become_columns_and_other_shapes_are_refused():
    ids, logprobs = _columns([flat(3, 4), flat(), flat(5)], [2, 0, 1], 1)
    assert ids.tolist() == [[3, 9], [4, 9], [5, 9]]
    assert (logprobs == [[-1.0, -0.5]] * 3).all()
    assert (ids.dtype, logprobs.dtype) == (np.int32, np.float32)
    for positions in ([1, 1, 1], [2, 0]):
        with pytest.raises(ValueError, match="expected"):
            _columns([flat(3, 4), flat(), flat(5)], positions, 1)


@pytest.mark.parametrize("ids", [(3, 5, 4), (4, 4, 5), (3, 4, 4)])
def test_log_probs_of_other_tokens_than_the_sampled_ones_are_refused(ids):
    def sample(reported: tuple[int, ...], *token_ids: int) -> SimpleNamespace:
        return SimpleNamespace(token_ids=token_ids, logprobs=flat(*reported), weight_versions=[], finish_reason="stop")

    same = _flatten([sample((3, 4), 3, 4), sample((5,), 5)], 1, {})
    assert same.token_ids.tolist() == [3, 4, 5]
    with pytest.raises(RuntimeError, match=r"log-probs at \d of 3 positions belong to other tokens"):
        _flatten([sample(ids[:2], 3, 4), sample(ids[2:], 5)], 1, {})


def reader(*, native: bool) -> ExpertsReader:
    config = SimpleNamespace(
        aux_output_config=SimpleNamespace(enabled=native),
        model_config=SimpleNamespace(is_moe=True, get_num_experts_per_tok=lambda: 2),
        device_config=SimpleNamespace(device_type="cuda" if native else "cpu"),
        use_v2_model_runner=False,
        speculative_config=None,
    )
    return ExpertsReader(EngineClient, config)


@pytest.mark.parametrize(
    ("native", "experts", "skipped"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_only_recorded_experts_need_every_position_computed(native, experts, skipped):
    kept = SimpleNamespace(native=False)
    params = _params(group("g", experts=experts), 1, reader(native=native), kept)
    assert bool(params.skip_reading_prefix_cache) == skipped
