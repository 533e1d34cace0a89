"""What workers recorded of a group is taken or forgotten, however the group ends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from dppo_megatron.engines.vllm.extension.generation import sample_group
from tests.support.engines import group


class Recorder:
    """Stands for a reader of recorded experts or sampling masks."""

    native, of_cached_positions = False, False

    def __init__(self, read):
        self._read, self.forgotten = read, []

    async def read(self, samples, names, prompt_tokens):
        return await self._read()

    async def forget(self, names):
        self.forgotten += names


async def breaks():
    raise RuntimeError("the worker does not answer")


async def waits():
    await asyncio.sleep(60)


class Server:
    async def generate(self, *_, **__):
        yield SimpleNamespace(finished=True, outputs=[SimpleNamespace(token_ids=[1], logprobs=None)])


@pytest.mark.slow
@pytest.mark.parametrize(("read", "ends"), [(breaks, RuntimeError), (waits, asyncio.CancelledError)])
def test_a_group_that_ends_while_its_experts_are_read_leaves_no_sampling_masks(read, ends):
    """They would lie in the worker for as long as it lives."""
    experts, kept = Recorder(read), Recorder(waits)
    request = group("lost", n=2, top_k=5, sampling_mask=True, experts=True)

    async def main():
        running = asyncio.create_task(sample_group(Server(), request, experts, kept, None, None))
        await asyncio.sleep(0.05)
        running.cancel()
        await running

    with pytest.raises(ends):
        asyncio.run(main())
    assert kept.forgotten == experts.forgotten == [f"lost/{index}/experts" for index in range(request.n)]
