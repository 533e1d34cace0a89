"""Sampled tokens stay unchanged and are in exactly one policy span, however a chat template rewrites history."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dppo_megatron.bank.checks import check_group
from dppo_megatron.data.prompts import render_chat
from dppo_megatron.rollout.environments.dialogue import Dialogue, Piece, as_rollout, common_beginning, opening_tokens
from dppo_megatron.types import ENVIRONMENT, INHERITED, POLICY, Prompt, Rollout, RolloutGroup

EOS = 1
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WITHOUT_THOUGHTS = TEMPLATE.replace("{{ m.content }}", "{{ m.content.split('!')[-1] }}")
TRIMMED = TEMPLATE.replace("{{ m.content }}", "{{ m.content | trim }}")
# Only the last message keeps its thoughts; a new message removes them from the earlier ones.
REASONER = TEMPLATE.replace(
    "{{ m.content }}", "{{ m.content if loop.index >= messages | length - 1 else m.content.split('!')[-1] }}"
)


def begin(tokenizer, template: str | None) -> Dialogue:
    messages = [{"role": "user", "content": "Hi"}]
    render = None
    if template is not None:
        tokenizer.chat_template = template

        def render(of):
            return render_chat(tokenizer, of)

    text = "Hi" if render is None else render(messages)
    ids = np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
    return Dialogue(tokenizer, render, messages, [[Piece(ENVIRONMENT, 0, text, ids)]])


def sampled(tokenizer, text: str, version: int, behind: int) -> Rollout:
    ids = np.array([*tokenizer.encode(text, add_special_tokens=False), EOS], np.int32)
    size = len(ids)
    lists = np.tile(np.arange(2, dtype=np.int32), (size, 1))  # the last token is in them
    rows = np.full((behind + size - 1, 1, 2), version, np.uint8)
    rows[..., 1] += 100
    return Rollout(
        ids, np.full(size, -float(version), np.float32), np.full(size, version, np.int32), "stop", lists,
        np.full((size, 2), -float(version), np.float32), rows,
    )  # fmt: skip


def play(tokenizer, dialogue: Dialogue, turns: list[tuple[str, str]]) -> list[Rollout]:
    given = []
    for number, (turn, said) in enumerate(turns):
        given.append(sampled(tokenizer, turn, number, len(dialogue.token_ids)))
        dialogue.add_turn(given[-1])
        if number + 1 < len(turns):
            dialogue.answer([{"role": "user", "content": said}])
    return given


def rows_of(dialogue: Dialogue) -> tuple[int, list[Rollout]]:
    branches = dialogue.finished()
    prompt = len(common_beginning([opening_tokens(branch) for branch in branches]))
    return prompt, [as_rollout(branch, prompt, "stop", 0) for branch in branches]


def policy_tokens(row: Rollout) -> np.ndarray:
    return row.token_ids[np.repeat(row.spans[:, 0] == POLICY, row.spans[:, 1])]


def assert_trained_once(tokenizer, dialogue: Dialogue, given: list[Rollout]) -> list[Rollout]:
    """Check that each sampled token is in one policy span, with the engine's values and the same tokens before it."""
    prompt, rows = rows_of(dialogue)
    own = np.concatenate([policy_tokens(row) for row in rows])
    np.testing.assert_array_equal(own, np.concatenate([r.token_ids for r in given]))
    for name in ("rollout_logprob", "versions", "topk_ids", "rollout_topk_logprob"):
        found = np.concatenate([getattr(row, name) for row in rows])
        np.testing.assert_array_equal(found, np.concatenate([getattr(r, name) for r in given]))
    first = dialogue.branches[0][0].token_ids[:prompt]
    check_group(
        RolloutGroup(
            Prompt(0, 0, first, "", ""), tuple(rows), np.zeros(len(rows), np.float32), np.zeros(len(rows), bool), 1.0
        )
    )
    return rows


TURNS = [("a !b", "one"), (" c!d ", "two"), ("e", "")]


def test_without_a_template_tokens_are_put_behind_tokens(tokenizer):
    dialogue = begin(tokenizer, None)
    given = play(tokenizer, dialogue, TURNS)
    (row,) = assert_trained_once(tokenizer, dialogue, given)
    assert row.spans.tolist() == [[0, 5, 0], [1, 3, 0], [0, 6, 1], [1, 3, 1], [0, 2, 2]]
    assert tokenizer.decode(row.token_ids) == "a !b<eos>one c!d <eos>twoe<eos>"


def test_a_template_that_keeps_history_never_branches(tokenizer):
    dialogue = begin(tokenizer, TEMPLATE)
    given = play(tokenizer, dialogue, TURNS)
    (row,) = assert_trained_once(tokenizer, dialogue, given)
    whole = "a !b<eos><user>one<assistant> c!d <eos><user>two<assistant>e<eos>"
    assert tokenizer.decode(row.token_ids) == whole
    assert row.routed_experts[:, 0, 0].tolist() == [0] * 23 + [1] * 26 + [2] * 22


@pytest.mark.parametrize("template", [WITHOUT_THOUGHTS, TRIMMED, REASONER])
def test_a_template_that_rewrites_history_branches(tokenizer, template):
    dialogue = begin(tokenizer, template)
    given = play(tokenizer, dialogue, TURNS)
    rows = assert_trained_once(tokenizer, dialogue, given)
    assert len(rows) > 1
    prompt = dialogue.branches[0][0].token_ids
    assert tokenizer.decode(prompt) == "<user>Hi<assistant>"
    # Each turn was sampled after the messages as the template rendered them then.
    last = np.concatenate([prompt, rows[-1].token_ids])
    assert tokenizer.decode(last) == dialogue.render([*dialogue.messages]) + "e<eos>"
    for row in rows[1:]:
        assert (row.spans[:, 0] != POLICY).any()
    assert all((row.spans[:, 0] == INHERITED).any() for row in rows[1:] if template == TRIMMED)


def test_a_template_that_rewrites_the_prompt_shortens_the_common_prefix(tokenizer):
    changing = "{{ messages | length }}" + TEMPLATE
    dialogue = begin(tokenizer, "same " + changing)
    given = play(tokenizer, dialogue, TURNS)
    rows = assert_trained_once(tokenizer, dialogue, given)
    assert rows_of(dialogue)[0] == len("same ")
    assert [len(row.spans) for row in rows] == [2, 2, 2]  # the environment's, then the turn


def test_a_dialogue_with_an_unanswered_message_ends_with_the_last_token_of_the_policy(tokenizer):
    dialogue = begin(tokenizer, TRIMMED)
    given = play(tokenizer, dialogue, [(" a ", "x")])
    dialogue.answer([{"role": "user", "content": "never answered"}])
    assert len(dialogue.branches) == 2
    (row,) = assert_trained_once(tokenizer, dialogue, given)
    assert row.spans.tolist() == [[0, 4, 0]]


@given(
    st.lists(st.tuples(st.text("ab !", max_size=4), st.text("ab !", max_size=4)), min_size=1, max_size=5),
    st.sampled_from([None, TEMPLATE, WITHOUT_THOUGHTS, TRIMMED, REASONER]),
)
@settings(max_examples=60, deadline=None)
def test_every_sampled_token_is_trained_once(tokenizer, turns, template):
    dialogue = begin(tokenizer, template)
    assert_trained_once(tokenizer, dialogue, play(tokenizer, dialogue, turns))
