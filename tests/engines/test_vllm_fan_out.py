"""A group's requests end together, however one of them ends; a vLLM without the interfaces is named."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from vllm.exceptions import QueueOverflowError, RetryableRequestError
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from dppo_megatron.engines.http import EngineCalls
from dppo_megatron.engines.vllm.extension.fan_out import FanOut, missing
from dppo_megatron.engines.vllm.extension.routes import _reporting_errors
from tests.support.engines import engine_config
from tests.support.fakes.http_server import against, http

NAMES, SEEDS = ["g/0", "g/1", "g/2"], [5, 6, 7]


class Engine:
    """Stands for vLLM's asynchronous engine; `sent` is called with each request that it takes."""

    errored = False

    def __init__(self, sent=lambda request: None):
        self.aborted, self.requests, self._sent = [], [], sent
        self.input_processor = SimpleNamespace(
            process_inputs=self._process_inputs, assign_request_id=self._assign_request_id
        )
        self.output_processor = SimpleNamespace(request_states={}, add_request=self._add_request)
        self.engine_core = SimpleNamespace(add_request_async=self._send)

    def _process_inputs(self, request_id, prompt, params, supported_tasks, lora_request):
        return SimpleNamespace(request_id=request_id, external_req_id=None, sampling_params=params)

    def _assign_request_id(self, request):
        request.external_req_id, request.request_id = request.request_id, f"{request.request_id}-x"

    def _add_request(self, request, prompt, parent_req, request_index, queue):
        request.index, request.queue = request_index, queue
        self.output_processor.request_states[request.request_id] = SimpleNamespace(logprobs_processor=None)

    async def _send(self, request):
        self.requests.append(request)
        self._sent(request)

    async def get_supported_tasks(self):
        return ("generate",)

    def check_admission(self, n, request_id):
        pass

    def _run_output_handler(self):
        pass

    async def abort(self, request_id, internal):
        assert internal
        self.aborted += request_id


def finals(engine):
    return FanOut(engine).finals(tokens_input([1, 2]), SamplingParams(seed=SEEDS[0]), SEEDS, NAMES, None)


def end(request):
    output = SimpleNamespace(index=request.index, seed=request.sampling_params.seed)
    request.queue.put(SimpleNamespace(finished=True, outputs=[output]))


def test_samples_come_in_the_order_of_their_seeds():
    engine = Engine()

    async def main():
        group = asyncio.create_task(finals(engine))
        await asyncio.sleep(0)
        for request in reversed(engine.requests):
            end(request)
        return await group

    assert [sample.seed for sample in asyncio.run(main())] == SEEDS
    assert [request.request_id for request in engine.requests] == [f"{name}-x" for name in NAMES]
    assert [request.external_req_id for request in engine.requests] == NAMES
    assert not engine.aborted


def test_a_group_that_is_given_up_is_aborted():
    engine = Engine()

    async def main():
        group = asyncio.create_task(finals(engine))
        await asyncio.sleep(0)
        end(engine.requests[0])
        group.cancel()
        await group

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert engine.aborted == [f"{name}-x" for name in NAMES]


@pytest.mark.parametrize(
    ("error", "raised", "aborted"),
    [
        (KeyError("x"), EngineGenerateError, 3),
        (EngineDeadError(), EngineDeadError, 0),
        (RetryableRequestError("paused"), RetryableRequestError, 3),
    ],
)
def test_the_error_of_one_ends_all(error, raised, aborted):
    engine = Engine(lambda request: request.index == 2 and request.queue.put(error))
    with pytest.raises(raised):
        asyncio.run(finals(engine))
    assert len(engine.aborted) == aborted


@pytest.mark.parametrize("error", [RetryableRequestError("paused"), QueueOverflowError()])
def test_a_group_that_the_engine_rejects_for_now_is_sent_again(tmp_path, error):
    """vLLM 0.33 rejects new requests during a pause in modes wait and abort: one request is queued, the rest fail."""

    async def route(_):
        def check_admission(n, request_id):
            raise error

        engine = Engine(lambda request: request.index == 1 and request.queue.put(error))
        if isinstance(error, QueueOverflowError):
            engine.check_admission = check_admission
        await finals(engine)

    async def send(engine):
        calls = EngineCalls(engine.url, None, "")
        try:
            return await calls.json("a request", "/route", 5.0)
        finally:
            await calls.close()

    rejected = asyncio.run(_reporting_errors(route)(None))
    replies = [http(rejected.status_code, rejected.body)] * 2 + [http(200, b"{}")]
    assert against(engine_config(tmp_path / "model"), {"/route": replies}, send) == {}


def test_what_a_vllm_lacks_is_named():
    assert missing(Engine()) == []
    engine = Engine()
    del engine.output_processor.request_states
    engine.engine_core.add_request_async = lambda core, message: None
    assert missing(engine) == ["output_processor.request_states", "engine_core.add_request_async"]
