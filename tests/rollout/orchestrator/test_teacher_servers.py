"""Which of a teacher's servers is asked, and when it is verified."""

import asyncio

import pytest

from dppo_megatron.rollout.engines.protocol import EngineIncompatible
from dppo_megatron.rollout.orchestrator.teachers import Teachers
from tests.rollout.orchestrator.test_teachers import URL, VOCAB, Encoder, Server, prompt, rollout, scored, teaching


def test_requests_go_to_the_servers_in_turn_and_after_a_failure_to_the_next(tmp_path):
    first, second = Server(), Server(fault=lambda n: "fails")

    async def main() -> None:
        async with first.serving(), second.serving():
            teachers = Teachers(teaching(tmp_path, {"a": {"urls": [first.url, second.url]}}), Encoder(), VOCAB, None)
            for position in range(4):
                await teachers.add(prompt(position=position), [rollout([9])])
            await teachers.close()

    asyncio.run(main())
    assert (len(first.asked), len(second.asked)) == (4, 2)


def test_after_a_failure_the_tokenizer_is_verified_again(tmp_path):
    """Another server may answer at the address then."""
    server = Server()

    def fault(n: int) -> str:
        if n == 1:
            server.encode = lambda text: [1, 2]
        return "fails" if n == 1 else ""

    server.fault = fault
    with pytest.raises(EngineIncompatible, match="another tokenizer"):
        scored(teaching(tmp_path, URL), server, prompt(), [rollout([9])], before=prompt())
