"""The byte budget of engines' replies keeps their order, always admits one, and makes clients wait before reading."""

import asyncio

import numpy as np
import pytest

from dppo_megatron.rollout.engines.byte_budget import ByteBudget
from dppo_megatron.rollout.engines.protocol import EngineUnavailable
from dppo_megatron.rollout.engines.vllm.client import VllmEngine
from dppo_megatron.rollout.engines.vllm.extension.wire import encode_reply
from tests.support.fakes.http_server import Last, against, http, read_request

from .test_vllm_client_faults import GOOD_ARRAYS, GOOD_HEADER, INFO_REPLY, REQUEST, config  # noqa: F401


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def started(call) -> asyncio.Task:
    return asyncio.get_running_loop().create_task(call)


async def test_room_is_given_in_the_order_it_was_asked_for():
    budget = ByteBudget(100)
    await budget.reserve(60)
    large, small = started(budget.reserve(50)), started(budget.reserve(10))
    await settled()
    assert not large.done()
    assert not small.done()  # it would fit, and the large one never would
    budget.release(60)
    await settled()
    assert large.done()
    assert small.done()
    assert budget.reserved == 60


async def test_one_reply_is_always_read_whatever_is_kept():
    """Groups are kept until another one has arrived, and a reply may be larger than the bound."""

    budget = ByteBudget(100)
    budget.charge(500)
    async with asyncio.timeout(5):
        await budget.reserve(300)
    second = started(budget.reserve(1))
    await settled()
    assert not second.done()
    budget.release(300)
    await settled()
    assert second.done()


async def test_one_that_is_cancelled_leaves_no_hole():
    budget = ByteBudget(100)
    await budget.reserve(90)
    waiting, behind = started(budget.reserve(50)), started(budget.reserve(10))
    await settled()
    waiting.cancel()
    await settled()
    assert behind.done()  # for whom there was room behind it
    admitted = started(budget.reserve(80))
    await settled()
    budget.release(90)
    admitted.cancel()  # at the very moment at which its turn came
    await settled()
    assert budget.reserved == 10


async def test_a_refund_admits_a_waiting_reservation():
    budget = ByteBudget(100)
    budget.charge(80)
    await budget.reserve(20)
    waiting = started(budget.reserve(30))
    await settled()
    assert not waiting.done()
    budget.refund(80)
    await settled()
    assert waiting.done()


class Server:
    """Answers generate requests with one good reply each, and counts the bytes that the client has taken of them."""

    def __init__(self, padding: int):
        arrays = GOOD_ARRAYS | {"padding": np.zeros(padding, np.uint8)}
        self.reply = encode_reply(GOOD_HEADER, arrays)
        self.sent: list[int] = []  # bytes of each reply that are on their way

    async def answer(self, reader, writer):
        try:
            while path := await read_request(reader):
                if path in INFO_REPLY:
                    writer.write(INFO_REPLY[path][0])
                    await writer.drain()
                    continue
                number = len(self.sent)
                self.sent.append(0)
                writer.write(b"HTTP/1.1 200 x\r\ncontent-length: %d\r\n\r\n" % len(self.reply))
                for begin in range(0, len(self.reply), 1 << 16):
                    writer.write(self.reply[begin : begin + (1 << 16)])
                    await writer.drain()
                    self.sent[number] = begin
        finally:
            writer.close()


async def test_a_client_reads_a_reply_only_while_there_is_room(config):  # noqa: F811
    """Three replies of 32 MB and room for one and a half: the others wait in the server, which cannot send them."""

    server = Server(padding=32 << 20)
    budget = ByteBudget(48 << 20)
    listening = await asyncio.start_server(server.answer, "127.0.0.1", 0)
    engine = VllmEngine(config, f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", budget)
    engine._suffix = "~00000000"  # as GOOD_HEADER names the request
    engine._generate_timeout_s = 60
    held = []
    decode = engine._decode_samples

    def note(*arguments):
        held.append((budget.reserved, sum(sent > 16 << 20 for sent in server.sent)))
        return decode(*arguments)

    engine._decode_samples = note
    try:
        async with asyncio.timeout(60):
            groups = await asyncio.gather(*(engine.generate(REQUEST) for _ in range(3)))
    finally:
        await engine.close()
        listening.close()
    assert all(len(group) == 2 for group in groups)
    assert [sent for _, sent in held] == [1, 2, 3]  # one after the other
    assert {reading for reading, _ in held} == {len(server.reply)}
    assert budget.reserved == 0


def test_a_reply_that_breaks_off_gives_its_room_back(config):  # noqa: F811
    async def generate(engine):
        engine._budget = budget
        with pytest.raises(EngineUnavailable):
            await engine.generate(REQUEST)

    budget = ByteBudget(100)
    against(config, INFO_REPLY | {"/dppo/generate": [Last(http(200, bytes(1000))[:-500])]}, generate)
    assert budget.reserved == 0
