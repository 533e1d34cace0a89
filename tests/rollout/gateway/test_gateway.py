"""Agents' requests as tokens: with every client each turn is stored once, as it was sampled, after its context."""

import asyncio
import copy
import json
from contextlib import asynccontextmanager
from functools import partial

import aiohttp
import numpy as np
import pytest

from dppo_megatron.bank.checks import check_group
from dppo_megatron.data.prompts import render_chat
from dppo_megatron.rollout.environments.conversation import Conversation, RequestRejected, TurnRequest
from dppo_megatron.rollout.environments.dialogue import as_rollout, common_beginning, opening_tokens
from dppo_megatron.types import Prompt, RolloutGroup
from tests.rollout.gateway import clients
from tests.rollout.gateway.conftest import Policy
from tests.rollout.gateway.scripted import Client, user
from tests.support.audit import audit

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


def check(conversation, policy) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streaming"])
@pytest.mark.parametrize("talk", [clients.chat, clients.responses, clients.messages])
async def test_a_published_client_holds_a_conversation_with_a_tool(serve, tokenizer, talk, stream):
    async with serve(looks_up) as (gateway, key, conversation, policy):
        assert await talk(gateway.url, key, stream) == ["tool_calls: wait", "stop: it is 1"]
        check(conversation, policy)
        (row,) = group_of(conversation).rollouts
    assert tokenizer.decode(row.token_ids) == f"a thought</think> wait  {CALL}<eos><tool>1<assistant>it is 1<eos>"
    assert row.spans[:, 0].tolist() == [0, 1, 0]


@asynccontextmanager
async def connected(gateway, key):
    async with aiohttp.ClientSession() as http:
        yield Client(http, gateway.url, key)


async def test_histories_that_differ_are_branches_and_none_is_sampled_twice(serve, tokenizer):
    async with (
        serve(lambda before: f"r{before.count('<user>')}") as (gateway, key, conversation, policy),
        connected(gateway, key) as client,
    ):
        first = await client.say([user("one")])
        second = await client.say([*first, user("two")])
        await client.say([user("one")])  # again: another sample of the same turn
        edited = [user("one"), {"role": "assistant", "content": "edited"}, user("two")]
        await client.say(edited)
        await asyncio.gather(*(client.say([*second, user(text)]) for text in ("three", "tres")))
        await client.say([user("summary of all"), user("four")])  # compaction
        check(conversation, policy)
        group = group_of(conversation)
    texts = [tokenizer.decode(np.concatenate([group.prompt.token_ids, r.token_ids])) for r in group.rollouts]
    assert texts[0].startswith("<user>one<assistant>r1<eos><user>two<assistant>r2<eos><user>t")
    assert texts[1] == "<user>one<assistant>r1<eos>"
    assert texts[2] == "<user>one<assistant>edited<eos><user>two<assistant>r2<eos>"
    assert texts[3].startswith("<user>one<assistant>r1<eos><user>two<assistant>r2<eos><user>t")
    assert texts[4] == "<user>summary of all<user>four<assistant>r2<eos>"
    assert [2 in row.spans[:, 0] for row in group.rollouts] == [False, False, False, True, False]


def test_turns_of_equal_text_keep_their_own_reasoning(tokenizer):
    """A turn is found by its place; the next turn tells equal ones apart, else the reasoning is left out."""
    said = (f"<think>{letter}</think>yes" for letter in "abcdefghij")
    policy = Policy(tokenizer, lambda before: next(said))
    conversation = Conversation(tokenizer, partial(render_chat, tokenizer), policy.sample)
    yes = {"role": "assistant", "content": "yes"}

    def reads(*messages) -> str:
        turn = asyncio.run(conversation.ask(TurnRequest(messages)))
        assert turn.content == "yes"
        return tokenizer.decode(policy.turns[-1][0], skip_special_tokens=False)

    one, two, more = user("1"), user("2"), user("+")
    reads(one)  # a
    reads(two)  # b
    assert reads(one, yes, more) == "<user>1<assistant><think>a</think>yes<eos><user>+<assistant>"  # c
    assert reads(two, yes, more) == "<user>2<assistant><think>b</think>yes<eos><user>+<assistant>"
    reads(one)  # e
    assert "a</think>yes<eos><user>+<assistant><think>c</think>yes<eos>" in reads(one, yes, more, yes, two)
    assert reads(one, yes, two) == "<user>1<assistant>yes<eos><user>2<assistant>"
    assert reads(user("edited"), yes, more) == "<user>edited<assistant>yes<eos><user>+<assistant>"
    check(conversation, policy)


@pytest.mark.parametrize("marks", [(), ("<think>", "</think>", "<tool_call>", "</tool_call>")])
def test_marks_that_are_special_tokens_still_separate(tokenizer, marks):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": list(marks)})
    policy = Policy(tokenizer, lambda before: f"<think>a thought</think> wait  {CALL}")
    conversation = Conversation(tokenizer, partial(render_chat, tokenizer), policy.sample)
    turn = asyncio.run(
        conversation.ask(TurnRequest([user("one")], [{"type": "function", "function": clients.DESCRIBED}]))
    )
    assert (turn.reasoning, turn.content, turn.calls[0].name) == ("a thought", "wait", "look_up")
    assert (conversation.calls, conversation.call_errors) == (1, 0)


def test_calls_that_cannot_be_read_are_counted(tokenizer):
    policy = Policy(tokenizer, lambda before: f'{CALL}<tool_call>{{"name": </tool_call>')
    conversation = Conversation(tokenizer, partial(render_chat, tokenizer), policy.sample)
    asked = TurnRequest([user("one")], [{"type": "function", "function": clients.DESCRIBED}])
    assert len(asyncio.run(conversation.ask(asked)).calls) == 1
    assert (conversation.calls, conversation.call_errors) == (2, 1)


def test_a_call_in_reasoning_that_the_prompt_opened_is_not_given_out(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = tokenizer.chat_template.replace("%}<assistant>", "%}<assistant><think>")
    policy = Policy(tokenizer, lambda before: f"I may {CALL} but")
    asked = TurnRequest([user("one")], [{"type": "function", "function": clients.DESCRIBED}])
    conversation = Conversation(tokenizer, partial(render_chat, tokenizer), policy.sample)
    turn = asyncio.run(conversation.ask(asked))
    assert (turn.reasoning, turn.content, turn.calls) == (f"I may {CALL} but", "", ())
    conversation = Conversation(tokenizer, partial(render_chat, tokenizer), policy.sample, "no known form")
    with pytest.raises(RequestRejected, match="tools: no known form"):
        asyncio.run(conversation.ask(asked))


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hung_up_receives_the_same_turn_when_it_asks_again(serve, caplog, stream, ended):
    async def main():
        async with (
            serve(lambda before: "yes", delay_s=0.3) as (gateway, key, conversation, policy),
            connected(gateway, key) as client,
        ):
            assert await client.hang_up([user("one")], after_s=0.1, stream=stream)
            if ended:
                await asyncio.sleep(0.4)
                assert len(policy.turns) == 1
            assert (await client.say([user("one")]))[-1]["content"] == "yes"
            assert len(policy.turns) == 1
            await client.say([user("one")])  # after it received the turn, the same question gets another one
            assert len(policy.turns) == 2
            check(conversation, policy)

    asyncio.run(main())
    said = [record for record in caplog.records if record.name.startswith(("aiohttp", "dppo_megatron"))]
    assert said == []  # agents may do so


async def test_an_unsupported_request_is_refused_with_a_message(serve):
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    wrong = [
        ({"n": 2}, "n = 2: not supported"),
        ({"stop": ["a"]}, 'stop = ["a"]: not supported'),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"frequency_penalty": 0.5}, "frequency_penalty = 0.5: not supported"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs = "),
        ({"min_tokens": 5, "n": 1, "stop": None}, "min_tokens = 5: not supported"),
        ({"max_tokens": -1}, "expected a positive integer"),
        ({"max_tokens": 0}, "expected a positive integer"),
        ({"messages": [{"role": "user", "content": image}]}, "unsupported content part 'image_url'"),
        ({"messages": ["a"]}, "not a request of /v1/chat/completions"),
        ({"messages": 3}, "messages = 3: not supported"),
        ({"messages": []}, "has no message"),
        ({"messages": [{"role": "user", "content": False}]}, "the prompt is bool, expected text"),
        ({"messages": [user("a"), {"role": "assistant", "function_call": {"name": "f"}}]}, "field function_call"),
        ({"system": "be brief"}, 'system = "be brief": not supported'),
        ({"max_output_tokens": 1}, "max_output_tokens = 1: not supported"),
        ({"stream": "false"}, 'stream = "false": not supported'),
        ({"stream": True, "stream_options": "x"}, 'stream_options = "x": not supported'),
        ({"tools": {}}, "tools = {}: not supported"),
        ({"tools": [{"type": "mcp"}]}, "unsupported tool type 'mcp'"),
        ({"tools": [{"function": {"name": 5}}]}, "with a string as name"),
    ]
    call = {"type": "tool_use", "id": "a", "name": "f", "input": [1]}
    of_others = [
        ("responses", {"messages": [user("a")], "input": "a"}, 'messages = [{"role": "user"'),
        ("responses", {"input": "a", "max_tokens": 1}, "max_tokens = 1: not supported"),
        ("responses", {"input": "a", "include": ["message.output_text.logprobs"]}, "include = "),
        ("responses", {"input": {}}, "has no message"),
        ("responses", {"input": "a", "instructions": 5}, "the prompt is int, expected text"),
        ("messages", {"messages": [user("a")], "max_completion_tokens": 1}, "max_completion_tokens = 1: not supported"),
        ("messages", {"messages": [user("a"), {"role": "assistant", "content": "b"}], "max_tokens": 1}, "prefilled"),
        ("messages", {"messages": [{"role": "user", "content": [call]}], "max_tokens": 1}, "are not an object"),
        (
            "messages",
            {"messages": [user("a")], "max_tokens": 1, "tools": [{"type": "bash_20250124"}]},
            "'bash_20250124'",
        ),
    ]

    async with (
        serve(lambda before: "yes") as (gateway, key, conversation, policy),
        connected(gateway, key) as client,
        connected(gateway, "guessed") as stranger,
    ):
        assert conversation.finished() == []
        for more, says in wrong:
            status, reply = await client.post(**{"messages": [user("a")], **more})
            assert (status, says in reply["error"]["message"]) == (400, True), reply
        for interface, body, says in of_others:
            status, reply = await client.post(**{"messages": None, **body, "path": f"/v1/{interface}"})
            assert (status, says in reply["error"]["message"]) == (400, True), reply
        status, reply = await client.post([user("a")], "/chat/completions")
        assert status == 404
        assert (
            "/chat/completions: no such route; set the base URL of OpenAI's client to url/v1"
            in reply["error"]["message"]
        )
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/sessions/x/v1/messages", "/x"):
            status, reply = await stranger.post([user("a")], path)
            assert (status, "no such session" in json.dumps(reply)) == (401, True)
        assert policy.turns == []
