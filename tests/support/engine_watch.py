"""What an engine was asked for and said, turn by turn, and what of it is in a bank."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from dppo_megatron.bank import BankReader
from dppo_megatron.bank.audit import Turn
from dppo_megatron.engines.vllm.extension.wire import decode_reply
from dppo_megatron.types import Rollout, RolloutGroup

REQUEST = re.compile(r"group-(\d+)\.(\d+)\.(\d+)-")


class Watch:
    """Stands before an engine: which turns were asked for, and what it said. `at_reply` is told before the client."""

    def __init__(self):
        self.asked: list[Turn] = []
        self.returned: dict[Turn, Rollout] = {}
        self.at_request: Callable[[Turn], None] = lambda turn: None
        self.at_reply: Callable[[Turn], None] = lambda turn: None

    async def __call__(self, path, body, forward):
        if path != "/dppo/generate":
            return await forward()
        position, seat, number = map(int, REQUEST.match(json.loads(body)["request_id"]).groups())
        turn = (position, seat, number)
        self.asked.append(turn)
        self.at_request(turn)
        reply = await forward()
        header, arrays = decode_reply(reply)
        self.returned[turn] = Rollout(
            **{name: arrays[name] for name in ("token_ids", "rollout_logprob", "versions")},
            finish_reason=header["finish_reasons"][0],
        )
        self.at_reply(turn)
        return reply


def groups_of(directory: Path) -> list[RolloutGroup]:
    reader = BankReader(directory / "samples/bank")
    groups = [reader.read(entry) for entry in reader.entries(0, reader.refresh())]
    return sorted(groups, key=lambda group: group.prompt.position)
