"""Time limits do not count time in which their process did not run."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest

from dppo_megatron.common.channel import TOKEN_BYTES, WorkerChannel
from dppo_megatron.common.deadline import Deadline, time_limit

TOKEN = b"t" * TOKEN_BYTES


async def limited(seconds: float | None, work_s: float) -> None:
    async with time_limit(seconds):
        await asyncio.sleep(work_s)


@pytest.mark.parametrize("seconds", [0.05, 1.1])
def test_a_limit_ends_on_time(seconds):
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(limited(seconds, 60))
    assert seconds <= time.monotonic() - start < seconds + 1


@pytest.mark.parametrize("seconds", [0.2, None])
def test_a_body_that_ends_in_time_is_not_cancelled(seconds):
    asyncio.run(limited(seconds, 0.01))


def test_a_limit_tells_its_expiry_from_a_timeout_of_the_body():
    async def fail() -> bool:
        try:
            async with time_limit(5) as limit:
                raise TimeoutError
        except TimeoutError:
            return limit.expired()

    assert not asyncio.run(fail())


def test_a_channel_waits_until_its_deadline():
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(TimeoutError):
        WorkerChannel(ours, TOKEN).receive(Deadline(0.1))


def test_a_long_message_arrives_whole():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(True)
        program = "import sys, time; time.sleep(1.2); sys.stdout.buffer.write(sys.stdin.buffer.read())"
        with subprocess.Popen([sys.executable, "-c", program], stdin=theirs, stdout=theirs) as echo:
            payload = os.urandom(3_000_000)
            channel = WorkerChannel(ours, TOKEN)
            channel.send(payload, Deadline(20))
            ours.shutdown(socket.SHUT_WR)
            assert channel.receive(Deadline(20)) == payload
            assert echo.wait(10) == 0


@pytest.mark.parametrize(
    "wait",
    [
        "asyncio.run(limited(3, 1.5))",
        pytest.param(
            "channel, ours = pair(); threading.Timer(1.5, channel.send, [b'reply']).start(); ours.receive(Deadline(3))",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["time_limit", "channel"],
)
def test_a_suspension_does_not_count(wait):
    program = f"""
        import asyncio, socket, threading
        from dppo_megatron.common.channel import WorkerChannel
        from dppo_megatron.common.deadline import Deadline
        from tests.common.test_deadline import TOKEN, limited

        def pair():
            return [WorkerChannel(end, TOKEN) for end in socket.socketpair()]

        print("begins", flush=True)
        {wait}
        print("ends")
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "begins\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGSTOP)
        time.sleep(4)
        process.send_signal(signal.SIGCONT)
        assert process.communicate(timeout=30)[0] == "ends\n"
