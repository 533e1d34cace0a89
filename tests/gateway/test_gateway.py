"""Agents' requests as tokens: whatever client, every turn stands once, as it was sampled, behind what it read."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from contextlib import suppress
from functools import partial

import aiohttp
import numpy as np
import pytest

from dppo_megatron.bank.audit import audit
from dppo_megatron.bank.checks import check_group
from dppo_megatron.data.prompts import render_chat
from dppo_megatron.environments.conversation import Conversation
from dppo_megatron.environments.dialogue import as_rollout, common_beginning, opening_tokens
from dppo_megatron.gateway import Gateway
from dppo_megatron.types import Prompt, RolloutGroup
from tests.gateway import clients
from tests.gateway.conftest import Policy

CALL = '<tool_call>{"name": "look_up", "arguments": {"key": "a"}}</tool_call>'


def looks_up(before: str) -> str:
    return "it is 1" if "<tool>" in before else f"a thought</think> wait  {CALL}"


def group_of(conversation) -> RolloutGroup:
    branches = conversation.finished()
    prompt = common_beginning([opening_tokens(branch) for branch in branches])
    rows = tuple(as_rollout(branch, len(prompt), "stop", 0) for branch in branches)
    rewards = np.zeros(len(rows), np.float32)
    group = RolloutGroup(Prompt(0, 0, prompt, "", ""), rows, rewards, rewards > 0, 1.0)
    check_group(group)
    return group


def check(conversation, policy) -> Counter[str]:
    """Every turn in one span, bit for bit, and behind the tokens it was sampled behind."""
    branches = conversation.finished()
    pieces = [piece.sampled for branch in branches for piece in branch if piece.sampled is not None]
    order = {id(rollout): number for number, (_, rollout) in enumerate(policy.turns)}
    returned = {(0, 0, piece.turn): piece.sampled for branch in branches for piece in branch if piece.sampled}
    assert sorted(order[id(rollout)] for rollout in pieces) == list(range(len(policy.turns)))
    audited = audit([group_of(conversation)], returned)
    assert audited.problems == []
    for branch in branches:
        ids = np.zeros(0, np.int32)
        for piece in branch:
            if piece.sampled is not None:
                assert np.array_equal(ids, policy.turns[order[id(piece.sampled)]][0])
            ids = np.concatenate([ids, piece.token_ids])
    return audited.counts


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streaming"])
@pytest.mark.parametrize("talk", [clients.chat, clients.responses, clients.messages])
def test_a_published_client_holds_a_conversation_with_a_tool(serve, tokenizer, talk, stream):
    async def main():
        async with serve(looks_up) as (gateway, key, conversation, policy):
            assert await talk(gateway.url, key, stream) == ["tool_calls: wait", "stop: it is 1"]
            check(conversation, policy)
            return group_of(conversation)

    (row,) = asyncio.run(main()).rollouts
    assert tokenizer.decode(row.token_ids) == f"a thought</think> wait  {CALL}<eos><tool>1<assistant>it is 1<eos>"
    assert row.spans[:, 0].tolist() == [0, 1, 0]


async def post(gateway, key, messages, *, path="/v1/chat/completions", **more):
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(gateway.url + path, json={"messages": messages, **more}, headers=headers) as reply,
    ):
        return reply.status, await reply.json()


def user(text: str) -> dict:
    return {"role": "user", "content": text}


async def say(gateway, key, messages, **more) -> list:
    status, reply = await post(gateway, key, messages, **more)
    assert status == 200, reply
    return [*messages, reply["choices"][0]["message"]]


def test_histories_that_differ_are_branches_and_none_is_sampled_twice(serve, tokenizer):
    async def main():
        async with serve(lambda before: f"r{before.count('<user>')}") as (gateway, key, conversation, policy):
            first = await say(gateway, key, [user("one")])
            second = await say(gateway, key, [*first, user("two")])
            await say(gateway, key, [user("one")])  # again: another sample of the same turn
            edited = [user("one"), {"role": "assistant", "content": "edited"}, user("two")]
            await say(gateway, key, edited)
            await asyncio.gather(*(say(gateway, key, [*second, user(text)]) for text in ("three", "tres")))
            await say(gateway, key, [user("summary of all"), user("four")])  # compaction
            check(conversation, policy)
            return group_of(conversation)

    group = asyncio.run(main())
    texts = [tokenizer.decode(np.concatenate([group.prompt.token_ids, r.token_ids])) for r in group.rollouts]
    assert texts[0].startswith("<user>one<assistant>r1<eos><user>two<assistant>r2<eos><user>t")
    assert texts[1] == "<user>one<assistant>r1<eos>"
    assert texts[2] == "<user>one<assistant>edited<eos><user>two<assistant>r2<eos>"
    assert texts[3].startswith("<user>one<assistant>r1<eos><user>two<assistant>r2<eos><user>t")
    assert texts[4] == "<user>summary of all<user>four<assistant>r2<eos>"
    assert [2 in row.spans[:, 0] for row in group.rollouts] == [False, False, False, True, False]


def test_who_hung_up_is_told_the_same_turn(serve):
    async def main():
        async with serve(lambda before: "yes", delay_s=0.3) as (gateway, key, conversation, policy):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await post(gateway, key, [user("one")])
            await asyncio.sleep(0.4)
            assert len(policy.turns) == 1
            assert (await say(gateway, key, [user("one")]))[-1]["content"] == "yes"
            assert len(policy.turns) == 1
            check(conversation, policy)

    asyncio.run(main())


def test_what_cannot_be_had_is_refused_with_a_line(serve):
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    wrong = [
        ({"n": 2}, "n = 2: not served here"),
        ({"stop": ["a"]}, 'stop = ["a"]: not served here'),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_tokens": -1}, "expected a positive integer"),
        ({"messages": [{"role": "user", "content": image}]}, "a part of type 'image_url'"),
        ({"messages": 3}, "not a request of /v1/chat/completions"),
        ({"tools": [{}]}, "KeyError: 'function'"),
    ]

    async def main():
        async with serve(lambda before: "yes") as (gateway, key, conversation, policy):
            assert conversation.finished() == []
            for more, says in wrong:
                status, reply = await post(gateway, key, **{"messages": [user("a")], **more})
                assert (status, says in reply["error"]["message"]) == (400, True), reply
            for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/sessions/x/v1/messages"):
                status, reply = await post(gateway, "guessed", [user("a")], path=path)
                assert (status, "no such session" in json.dumps(reply)) == (401, True)
            assert policy.turns == []

    asyncio.run(main())


SESSIONS, AT_ONCE = 1000, 50


async def scripted(gateway, key, policy, seed: int) -> None:
    """An agent that calls tools, edits its history, sums it up, asks again, asks side by side and hangs up."""
    rng = np.random.default_rng(seed)
    history = [user("one")]
    for step in range(5):
        tools = [{"type": "function", "function": clients.DESCRIBED}] if rng.random() < 0.5 else []
        match rng.integers(6):
            case 0:  # an edit of what the policy said, or nothing yet
                history = [m if m["role"] == "user" else {**m, "content": f"e{step}"} for m in history]
            case 1:
                history = [user(f"so far {step}")]
            case 2:
                await say(gateway, key, history, tools=tools)
            case 3:
                await asyncio.gather(*(say(gateway, key, [*history, user(text)], tools=tools) for text in "ab"))
            case 4:
                with suppress(TimeoutError):
                    policy.delay_s = 0.02
                    async with asyncio.timeout(0.01):
                        await post(gateway, key, history, tools=tools)
                policy.delay_s = 0.0
        history = await say(gateway, key, history, tools=tools)
        called = history[-1].get("tool_calls", ())
        history += [{"role": "tool", "tool_call_id": call["id"], "content": "1"} for call in called]
        history += [] if called else [user(f"next {step}")]


@pytest.mark.slow
def test_a_thousand_sessions_lose_and_double_no_token(tokenizer):
    counts: Counter[str] = Counter()

    async def session(gateway, seed: int) -> None:
        rng = np.random.default_rng([seed, 1])
        said = (f"r{n}</think> {CALL}" if rng.random() < 0.4 else f" r{n} " for n in itertools.count())
        policy = Policy(tokenizer, lambda before: next(said))
        conversation = Conversation(tokenizer, partial(render_chat, tokenizer), policy.sample)
        async with gateway.session(conversation) as key:
            await scripted(gateway, key, policy, seed)
        counts.update(check(conversation, policy))

    async def main() -> None:
        async with Gateway("127.0.0.1") as gateway:
            for begin in range(0, SESSIONS, AT_ONCE):
                await asyncio.gather(*(session(gateway, seed) for seed in range(begin, begin + AT_ONCE)))

    asyncio.run(main())
    print(dict(counts))
    assert counts["trajectories"] == SESSIONS
    assert counts["branches"] > 2 * SESSIONS
    assert counts["inherited tokens"] > 0
