"""Tool calls in the formats of all families: one parser for environments and agents, checked against the template."""

from __future__ import annotations

import pickle
import time
from functools import partial

import numpy as np
import pytest

from dppo_megatron.data.prompts import render_chat
from dppo_megatron.rollout.environments.dialogue import Dialogue, Piece
from dppo_megatron.rollout.environments.tool_messages import tools_problem
from dppo_megatron.rollout.environments.tools import Tools, opened_reasoning, tool_calls, turn_parts
from dppo_megatron.rollout.environments.worker import _Host
from dppo_megatron.types import ENVIRONMENT
from tests.rollout.environments.test_dialogue import sampled


def price(product: str, count: int = 1, more: dict[str, list[int]] | None = None, note: str | None = None) -> float:
    """The price."""


TOOLS = Tools([price]).schemas
# Of each family: a call with the argument `product` and its JSON, as its template writes it.
HERMES = '<tool_call>\n{"name": "price", "arguments": %s}\n</tool_call>'
LLAMA = '{"name": "price", "parameters": %s}'
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>price<｜tool▁sep｜>%s<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
DEEPSEEK_V3 = DEEPSEEK.replace("price", "function").replace("%s", "price\n```json\n%s\n```")
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.price:3<|tool_call_argument_begin|>%s<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)
MISTRAL = '[TOOL_CALLS] [{"name": "price", "arguments": %s, "id": "abcdefgh1"}]'
MISTRAL_NEW = "[TOOL_CALLS]price[CALL_ID]abcdefgh1[ARGS]%s"
GPT_OSS = "<|start|>assistant<|channel|>commentary to=functions.price <|constrain|>json<|message|>%s<|call|>"
JSON = (HERMES, LLAMA, DEEPSEEK, DEEPSEEK_V3, KIMI, MISTRAL, MISTRAL_NEW, GPT_OSS)
QWEN = "<tool_call>\n<function=price>\n<parameter=product>\n%s\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>price\n<arg_key>product</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>"
THOUGHTS = ("<think>%s</think>", "[THINK]%s[/THINK]", "%s</think>", "<|channel|>analysis<|message|>%s<|end|>")


@pytest.mark.parametrize("form", [*JSON, QWEN, GLM])
def test_calls_of_every_family_are_read_but_not_in_reasoning(form):
    text = '"tea"' if form in JSON else "tea"
    call = form % (f'{{"product": {text}}}' if form in JSON else text)
    for thought in THOUGHTS:
        if form == GPT_OSS and "<|channel|>" not in thought:
            continue
        shown = "<|start|>assistant<|channel|>final<|message|>No." if "<|channel|>" in thought else "No."
        draft = call.removeprefix("<|start|>assistant")
        assert tool_calls((thought % f"I may call {draft} but no.") + shown, TOOLS) == []
        assert turn_parts((thought % draft) + shown, True)[1:] == ("No.", [])
        real = call if form == GPT_OSS else shown.removesuffix("No.") + call
        assert [(c.name, c.arguments, c.problem) for c in tool_calls((thought % draft) + real, TOOLS)] == [
            ("price", {"product": "tea"}, "")
        ]
        assert turn_parts((thought % "hm") + real, True)[:2] == ("hm", "")
    for unfinished in ("<think>", "[THINK]", "<|channel|>analysis<|message|>"):
        assert tool_calls(f"{unfinished}I may call {call.removeprefix('<|start|>assistant')} but") == []
    assert turn_parts(call, False)[2] == []


@pytest.mark.parametrize("form", [form for form in JSON if form != LLAMA])
def test_json_arguments_and_ids_return_as_they_were_written(form):
    hard = '{"product": "7 </think> \\"é\\" </tool_call> <tool_call>{ [/THINK]", "more": {"a": [1, {"b": null}]}}'
    first, second = tool_calls((form % hard) + (form % '{"product": "7"}').replace(":3<", ":4<").replace("1", "2"))
    assert first.arguments == {
        "product": '7 </think> "é" </tool_call> <tool_call>{ [/THINK]', "more": {"a": [1, {"b": None}]},
    }  # fmt: skip
    assert second.arguments == {"product": "7"}
    ids_of = {KIMI: ("functions.price:3", "functions.price:4")}
    ids_of |= dict.fromkeys((MISTRAL, MISTRAL_NEW), ("abcdefgh1", "abcdefgh2"))
    assert (first.id, second.id) == ids_of.get(form, ("", ""))


@pytest.mark.parametrize("form", [QWEN, GLM])
def test_tagged_arguments_have_the_types_of_the_tool(form):
    for name, raw, value in [
        ("product", "007", "007"), ("product", "a\nb </p> é", "a\nb </p> é"), ("count", "12", 12),
        ("more", '{"a": [1]}', {"a": [1]}), ("more", "null", None), ("note", "null", None), ("note", "5", "5"),
        ("count", "many", "many"), ("unknown", "true", True),
    ]:  # fmt: skip
        (call,) = tool_calls((form % raw).replace("product", name), TOOLS)
        assert call.arguments == {name: value}
    assert tool_calls((form % "7").replace("price", "other"))[0].arguments == {"product": 7}  # without a schema


@pytest.mark.parametrize("form", [form for form in JSON if form != LLAMA])
def test_a_malformed_call_leaves_the_other_one(form):
    good, bad = form % '{"product": "tea"}', form % '{"product": "tea"'
    for turn in (good + bad, bad + good):
        assert sorted(bool(call.problem) for call in tool_calls(turn)) == [False, True]
        _, content, calls = turn_parts(turn, True)
        (call,) = (call for call in calls if not call.problem)
        assert call.arguments == {"product": "tea"}
        assert '{"product": "tea"' in content
    with pytest.raises(ValueError, match="not JSON"):
        Tools([price]).call(*tool_calls(bad))


@pytest.mark.parametrize(
    ("turn", "problem"),
    [
        (LLAMA % '{"product": "tea"', "not JSON: Expecting"),
        (HERMES % '{"product": "tea"}}', "not JSON: text after its end"),
        ('<tool_call>{"name": "price"}</tool_call>', "expected an object with name and arguments"),
        ("<tool_call><function=price><parameter=product>tea</function></tool_call>", "expected an object"),
        ("<tool_call>price<arg_key>product</arg_key></tool_call>", "expected an object"),
        (KIMI % "[]", "expected an object"),
        (HERMES % ("[" * 100_000), "not JSON"),
    ],
)
def test_a_malformed_call_states_why(turn, problem):
    (call,) = tool_calls(turn)
    assert call.problem.startswith(problem)


def test_other_text_is_not_read_as_a_tool_call():
    answer = '{"name": "Bob", "age": {"parameters": 1}}'
    for text in ("", "{", '{"answer": 1}', "[1, 2]", answer, "use </tool_call>", "a <function=x> b"):
        assert tool_calls(text) == []


def test_no_turn_takes_long_to_parse():
    started = time.process_time()
    for before in ("", "</think>", "<tool_call>", "<|channel|>final<|message|>", "<|tool_call_begin|>a:1"):
        for part in (" ", '{"name', "</think>", "<tool_call>{", "[TOOL_CALLS]a ", "<|start|>assistant<|channel|>",
                     "<tool_call>a<arg_key>b</arg_key>", "<tool_call><function=a><parameter=b>x"):  # fmt: skip
            tool_calls(before + part * (20_000 // len(part)))
    assert time.process_time() - started < 5  # a quadratic pattern takes minutes


def ask(**message) -> dict:
    return {"role": "user", "content": "?"} | message


SHOWN = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
TURNS = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}{% set f = c.function %}"
END = "{% endfor %}<eos>{% endfor %}assistant:"
VALUE = "{{ v if v is string else v | tojson }}"
NINE = "{% if id | length != 9 %}{{ raise_exception('length') }}{% endif %}"
TEMPLATES = {
    "hermes": SHOWN + TURNS + "<tool_call>{{ f | tojson }}</tool_call>" + END,
    "llama": SHOWN + TURNS + '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}' + END,
    "qwen3.5": SHOWN + TURNS + "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments | items %}"
    "<parameter={{ k }}>\n" + VALUE + "\n</parameter>\n{% endfor %}</function>\n</tool_call>" + END + "<think>\n",
    "glm": SHOWN + TURNS + "\n<tool_call>{{ f.name }}\n{% for k, v in f.arguments | items %}<arg_key>{{ k }}"
    "</arg_key>\n<arg_value>" + VALUE + "</arg_value>\n{% endfor %}</tool_call>" + END,
    # adds texts, so arguments must be text
    "deepseek": SHOWN + TURNS + "<｜tool▁call▁begin｜>{{ f.name + '<｜tool▁sep｜>' + f.arguments }}"
    "<｜tool▁call▁end｜>" + END,
    "kimi": SHOWN + TURNS + "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}"
    "<|tool_call_end|>" + END,
    "mistral": "{% for m in messages | rejectattr('role', 'equalto', 'tool') | selectattr('tool_calls', 'undefined') %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% endfor %}" + SHOWN + "{% for m in messages %}{% if m.role == 'tool' %}{% set id = m.tool_call_id %}" + NINE
    + "[RESULT]{% endif %}{% if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{% set id = c.id %}" + NINE
    + '{{ (c.function | tojson)[:-1] }}, "id": "{{ id }}"}{% endfor %}]{% else %} {{ m.content }}{% endif %}<eos>'
    "{% endfor %}",
    "gpt-oss": SHOWN
    + "{% set last = namespace(name=none) %}{% for m in messages %}{% if m.role == 'user' %}<|start|>user<|message|>"
    "{{ m.content }}<|end|>{% elif m.role == 'tool' %}{% if last.name is none %}{{ raise_exception('no call') }}"
    "{% endif %}<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}"
    "<|end|>{% else %}{% if '<|channel|>analysis' in m.content %}{{ raise_exception('channel') }}{% endif %}"
    "{% if 'tool_calls' in m %}{% set f = m.tool_calls[0].function %}{% if m.thinking %}<|start|>assistant<|channel|>"
    "analysis<|message|>{{ m.thinking }}<|end|>{% endif %}<|start|>assistant to=functions.{{ f.name }}<|channel|>"
    "commentary json<|message|>{{ f.arguments | tojson }}<|call|>{% set last.name = f.name %}{% else %}<|start|>"
    "assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% set last.name = none %}{% endif %}{% endif %}"
    "{% endfor %}<|start|>assistant",
}  # fmt: skip


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_template_with_calls_that_are_parsed_back_has_no_problem(tokenizer, family):
    tokenizer.chat_template = TEMPLATES[family]
    assert tools_problem(partial(render_chat, tokenizer)) is None


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (
            TURNS + "<tool_call>{{ f | tojson }}</tool_call>" + END,
            "it does not show tools to the policy; use another model",
        ),
        (SHOWN + TURNS + END, "writes a call in an unknown form: ''"),
        (SHOWN + TURNS + "<call>{{ f | tojson }}</call>" + END, "writes a call in an unknown form: '<call>"),
        (SHOWN + TURNS + "<tool_call>{{ f.name | tojson }}</tool_call>" + END, "writes a call in an unknown form"),
        (TEMPLATES["glm"].replace(VALUE, "{{ v }}"), "writes a call in an unknown form"),
        (SHOWN + TURNS + "{{ raise_exception('no') }}" + END, "rejects it: no"),
        (TEMPLATES["hermes"].replace("m.role }}", "raise_exception('no') if m.role == 'tool' }}"), "rejects it: no"),
    ],
)
def test_a_template_that_does_not_return_a_call_is_reported(tokenizer, template, problem):
    tokenizer.chat_template = template
    assert problem in tools_problem(partial(render_chat, tokenizer))


def test_a_template_that_takes_results_only_after_calls_gets_them(tokenizer):
    tokenizer.chat_template = TEMPLATES["gpt-oss"]
    render = partial(render_chat, tokenizer)
    text = render([ask()])
    dialogue = Dialogue(
        tokenizer,
        render,
        [ask()],
        [[Piece(ENVIRONMENT, 0, text, np.array(tokenizer.encode(text, add_special_tokens=False)))]],
    )
    for said in ("one", "two"):
        turn = "<|channel|>analysis<|message|>hm<|end|>" + GPT_OSS % '{"product": "tea"}'
        dialogue.add_turn(sampled(tokenizer, turn, 0, 1))
        dialogue.answer([{"role": "tool", "content": said, "tool_call_id": "a", "name": "price"}])
    read = tokenizer.decode(dialogue.token_ids)
    assert read.count("<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.price") == 2
    assert (
        '{"product": "tea"}<|call|><|start|>functions.price to=assistant<|channel|>commentary<|message|>"two"' in read
    )


def test_only_a_prompt_that_ends_with_the_mark_opens_reasoning():
    assert opened_reasoning("Begin with <think>. assistant:<think>\n") == "<think>"
    assert opened_reasoning("Begin with <think>. assistant:") == opened_reasoning("<think>\n\n</think>\n\n") == ""


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (("described",), "reset: too many positional arguments; write reset(self, prompt, seed)"),
        (("step", "x"), "step returned ('x', 0.0, True, {}), expected (text, reward or None, whether it is the end)"),
    ],
)
def test_methods_of_another_form_are_named(request_, says):
    class OfAnotherPackage:
        def reset(self):
            pass

        def step(self, text):
            return text, 0.0, True, {}

    host = _Host(OfAnotherPackage)
    host._environment = OfAnotherPackage()
    kind, reason, detail = host.answer(pickle.dumps(request_))
    assert (kind, reason, detail) == ("failed", "raised", f"TypeError: {says}")
