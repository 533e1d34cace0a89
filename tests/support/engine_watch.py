"""Records an engine's requests and replies turn by turn, and reads a bank's groups."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dppo_megatron.bank import BankReader
from dppo_megatron.bank.audit import Turn
from dppo_megatron.rollout.engines.protocol import GenerateRequest
from dppo_megatron.rollout.engines.sglang import wire as sglang
from dppo_megatron.rollout.engines.vllm.extension.wire import decode_reply, decode_samples
from dppo_megatron.types import Rollout, RolloutGroup

REQUEST = re.compile(rb'"group-(\d+)\.(\d+)\.(\d+)-')


class Watch:
    """Records which turns an engine was asked for and its replies. Calls `at_reply` before the client gets the reply.

    Turns are numbered in request order. If an agent sends requests in parallel, the bank numbers turns as they end.
    """

    def __init__(self):
        self.asked: list[Turn] = []
        self.behind: dict[Turn, np.ndarray] = {}  # the tokens that the engine read before the turn
        self.returned: dict[Turn, Rollout] = {}
        self.at_request: Callable[[Turn], None] = lambda turn: None
        self.at_reply: Callable[[Turn], None] = lambda turn: None

    async def __call__(self, path, body, forward):
        if path not in READ or not (found := REQUEST.search(body)):  # probes of an engine sample, too
            return await forward()
        turn = tuple(map(int, found.groups()))
        asked = json.loads(body)
        token_ids, read = READ[path](asked)
        self.asked.append(turn)
        self.behind[turn] = np.array(token_ids, np.int32)
        self.at_request(turn)
        reply = await forward()
        self.returned[turn] = read(reply)
        self.at_reply(turn)
        return reply


def _vllm(asked: dict) -> tuple[list[int], Callable[[bytes], Rollout]]:
    def read(reply: bytes) -> Rollout:
        header, arrays = decode_reply(reply)
        return decode_samples(header, arrays).rollouts(len(asked["token_ids"]))[0]

    return asked["token_ids"], read


def _sglang(asked: dict) -> tuple[list[int], Callable[[bytes], Rollout]]:
    (name,), (token_ids,), (sampling,) = asked["rid"], asked["input_ids"], asked["sampling_params"]
    request = GenerateRequest(
        name.rpartition("#")[0], np.array(token_ids), 1, (sampling["sampling_seed"],), sampling["temperature"],
        sampling["max_new_tokens"], tuple(sampling["stop_token_ids"]), asked["top_logprobs_num"],
    )  # fmt: skip
    return token_ids, lambda reply: sglang.decode_group(reply, request, None).rollouts(len(token_ids))[0]


READ = {"/dppo/generate": _vllm, "/generate": _sglang}


def groups_of(directory: Path) -> list[RolloutGroup]:
    reader = BankReader(directory / "samples/bank")
    groups = [reader.read(entry) for entry in reader.entries(0, reader.refresh())]
    return sorted(groups, key=lambda group: group.prompt.position)
