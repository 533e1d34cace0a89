"""All samples of a group in the engine: each a request of its own with its own seed, the work around them done once.

vLLM's `generate` checks the input, makes a task, an iterator and an event for every request; with answers of a few
tokens that costs more than computing them. Its own fan-out (`n` above 1) does not, but numbers the seeds itself.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from copy import copy

from vllm.engine.protocol import EngineClient
from vllm.exceptions import GracefulHTTPError, RetryableRequestError, VLLMClientError
from vllm.inputs.engine import EngineInput
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from .rows import keep_rows

INTERNALS: dict[str, tuple[str, ...]] = {
    "errored": (),
    "abort": ("request_id", "internal"),
    "check_admission": ("n", "request_id"),
    "get_supported_tasks": (),
    "_run_output_handler": (),
    "input_processor.process_inputs": ("request_id", "prompt", "params", "supported_tasks", "lora_request"),
    "input_processor.assign_request_id": ("request",),
    "output_processor.request_states": (),
    "output_processor.add_request": ("request", "prompt", "parent_req", "request_index", "queue"),
    "engine_core.add_request_async": ("request",),
}
"""What `FanOut` uses of vLLM's asynchronous engine (0.32), and the arguments it passes. Otherwise it needs of them that
`add_request` makes a request's state, whose results go to `put` of the queue, the last as `finished`."""


def missing(engine: EngineClient) -> list[str]:
    """Of `INTERNALS`, what this engine lacks or calls by other arguments."""
    return [path for path, arguments in INTERNALS.items() if not _takes(engine, path, arguments)]


def _takes(engine: EngineClient, path: str, arguments: Sequence[str]) -> bool:
    found: object = engine
    for name in path.split("."):
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    if not callable(found):
        return not arguments
    try:
        inspect.signature(found).bind(**dict.fromkeys(arguments))
    except TypeError:
        return False
    return True


class FanOut:
    """For engines of which nothing is `missing`."""

    def __init__(self, engine: EngineClient):
        self._engine = engine

    async def finals(
        self,
        prompt: EngineInput,
        params: SamplingParams,
        seeds: Sequence[int | None],
        names: Sequence[str],
        adapter: LoRARequest | None,
    ) -> list[CompletionOutput]:
        """The finished sample of each name and seed, with `params` but for the seed.

        Errors are those of vLLM's `generate`. Cancelling it, or the failure of one sample, aborts all in the engine.
        """
        engine, group, added = self._engine, _Group(len(names)), []
        try:
            if engine.errored:
                raise EngineDeadError()
            tasks = await engine.get_supported_tasks()
            first = engine.input_processor.process_inputs(
                request_id=names[0], prompt=prompt, params=params, supported_tasks=tasks, lora_request=adapter
            )
            engine.check_admission(n=len(names), request_id=names[0])
            engine._run_output_handler()
            engine.input_processor.assign_request_id(request=first)
            ending = first.request_id.removeprefix(names[0])  # random, of all of the group
            for index, (name, seed) in enumerate(zip(names, seeds, strict=True)):
                request = copy(first)
                request.external_req_id, request.request_id = name, name + ending
                request.sampling_params = copy(first.sampling_params)
                request.sampling_params.seed = seed
                engine.output_processor.add_request(
                    request=request, prompt=None, parent_req=None, request_index=index, queue=group
                )
                added.append(request.request_id)
                keep_rows(engine.output_processor.request_states[request.request_id])
                await engine.engine_core.add_request_async(request=request)
            return await group.samples
        except (EngineDeadError, VLLMClientError, GracefulHTTPError):
            raise
        except BaseException as error:
            await engine.abort(request_id=added, internal=True)
            if isinstance(error, RetryableRequestError) or not isinstance(error, Exception):
                raise
            raise EngineGenerateError() from error


class _Group:
    """In the place of vLLM's queue of one request: waits for the last of `n` results."""

    def __init__(self, n: int):
        self._found: list[CompletionOutput | None] = [None] * n
        self._left = n
        self.samples = asyncio.get_running_loop().create_future()

    def put(self, output: RequestOutput | Exception) -> None:
        if self.samples.done():  # cancelled, or one of them failed
            return
        if isinstance(output, Exception):
            self.samples.set_exception(output)
        elif output.finished:
            (sample,) = output.outputs
            self._found[sample.index] = sample
            self._left -= 1
            if not self._left:
                self.samples.set_result(self._found)
