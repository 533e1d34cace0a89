import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from dppo_megatron.config.schema import DataConfig
from dppo_megatron.data.prompts import PromptFileError, PromptSource
from dppo_megatron.data.tokenizer import load_tokenizer
from tests.support.tokenizers import CHAT, save_character_model

GSM8K = Path(__file__).parent / "gsm8k_sample.jsonl"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(save_character_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def sums(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": i + 1}) + "\n" for i in range(10)))
    return path


def source(path, tokenizer, seed=7, **settings):
    return PromptSource(path, tokenizer, DataConfig(train=path, **settings), seed)


def test_a_prompt_carries_its_row(sums, tokenizer):
    prompts = source(sums, tokenizer, shuffle=False)
    assert len(prompts) == 10
    prompt = prompts.prompt(13)
    assert (prompt.position, prompt.row, prompt.text, prompt.answer) == (13, 3, "3+1=", "4")
    assert prompt.columns == {"prompt": "3+1=", "answer": 4}
    assert prompt.token_ids.dtype == np.int32
    assert tokenizer.decode(prompt.token_ids) == "3+1="


def test_every_epoch_visits_every_row_once_in_its_own_order(sums, tokenizer):
    prompts = source(sums, tokenizer)
    rows = [prompts.prompt(p).row for p in range(30)]
    epochs = [rows[0:10], rows[10:20], rows[20:30]]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_order_resumes_from_any_position(sums, tokenizer):
    whole = [source(sums, tokenizer).prompt(p).row for p in range(25)]
    resumed = source(sums, tokenizer)
    for position in (24, 3, 17, 3, 0):
        assert resumed.prompt(position).row == whole[position]
    assert [source(sums, tokenizer, seed=8).prompt(p).row for p in range(25)] != whole


def test_the_order_never_changes_between_releases(sums, tokenizer):
    # Written down once: a run must resume in the same order under any later version of this code or of numpy.
    prompts = source(sums, tokenizer, seed=7)
    assert [prompts.prompt(p).row for p in range(10)] == [6, 3, 4, 9, 0, 2, 8, 7, 5, 1]
    assert [prompts.prompt(p).row for p in range(10, 20)] == [1, 3, 2, 7, 8, 4, 5, 9, 0, 6]


def test_real_questions(tokenizer):
    prompts = source(GSM8K, tokenizer, prompt_column="question", prompt_template="Q: {prompt}\nA: {x}", shuffle=False)
    assert len(prompts) == 20
    assert prompts.prompt(0).text.startswith("Q: Natalia sold clips")
    assert prompts.prompt(0).text.endswith("\nA: {x}")
    assert prompts.prompt(0).answer.endswith("#### 72")


def test_every_malformed_line_is_reported_at_once(tmp_path, tokenizer):
    path = tmp_path / "bad.jsonl"
    lines = [
        '{"prompt": "1+1=", "answer": "2"}',
        '{"prompt": "1+1=", "answer": "2"',
        "",
        '{"promt": "1+1=", "answer": "2"}',
        '{"prompt": "  ", "answer": "2"}',
        '{"prompt": "' + "9" * 40 + '", "answer": "2"}',
        "[1, 2]",
        '{"prompt": 5, "answer": "2"}',
        '{"prompt": "1+1=", "answer": null}',
        '{"prompt": "1+1="}',
    ]
    path.write_bytes("\n".join(lines).encode() + b'\n{"prompt": "\xff", "answer": "2"}\n\n\n')
    with pytest.raises(PromptFileError) as raised:
        source(path, tokenizer, max_prompt_tokens=16)
    assert [number for number, _ in raised.value.violations] == [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    message = str(raised.value)
    assert "bad.jsonl: 10 malformed lines" in message
    for expected in (
        "line 2: not JSON",
        "line 3: blank",
        "line 4: no column 'prompt' (data.prompt_column); it has 'promt', 'answer'",
        "line 5: the prompt is empty",
        "line 6: 40 tokens, data.max_prompt_tokens is 16",
        "line 7: expected a JSON object, found list",
        "line 8: the prompt is int",
        "line 9: the answer is NoneType",
        "line 10: no column 'answer' (data.answer_column)",
        "line 11: not UTF-8",
    ):
        assert expected in message


def test_json_lines_with_the_name_of_a_parquet_file(tmp_path, tokenizer):
    path = tmp_path / "train.parquet"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    with pytest.raises(PromptFileError, match=r"its content is JSON; rename it to \.jsonl"):
        source(path, tokenizer)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (gzip.compress(b'{"prompt": "1"}\n', mtime=0), "its content is gzip; unpack it, and name the result"),
        ('{"prompt": "1"}\n'.encode("utf-16"), "UTF-16; save it as UTF-8"),
    ],
    ids=["gzip", "UTF-16"],
)
def test_a_file_of_another_form_is_one_problem(content, says, tmp_path, tokenizer):
    path = tmp_path / "train.jsonl"
    path.write_bytes(content)
    with pytest.raises(PromptFileError, match=says):
        source(path, tokenizer)


@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_list_is_one_problem_with_the_command_that_converts_it(indent, tmp_path, tokenizer):
    path = tmp_path / "list.json"
    path.write_text(json.dumps([{"prompt": "1", "answer": "1"}] * 3, indent=indent))
    with pytest.raises(PromptFileError, match=r"list.json: a JSON list; .*\(`jq -c '.\[\]' FILE`\)$"):
        source(path, tokenizer)


def test_equal_problems_are_one_line_with_a_count_and_the_first_rows(tmp_path, tokenizer):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"question": "1", "answer": "1"}\n' * 200 + "{\n" + "[]\n" * 2)
    with pytest.raises(PromptFileError) as raised:
        source(path, tokenizer)
    assert str(raised.value).splitlines()[1:] == [
        "  - 200 lines (1-200): no column 'prompt' (data.prompt_column); it has 'question', 'answer'",
        "  - line 201: not JSON: Expecting property name at character 2",
        "  - 2 lines (202-203): expected a JSON object, found list",
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"prompt": "\\u0000", "answer": "2"}', "the prompt has the control character U+0000 at character 1"),
        (b'{"prompt": "1", "answer": "\\frac12"}', "a LaTeX command whose backslash was not escaped?"),
        (b'{"prompt": "\\ud800", "answer": "2"}', "half a surrogate pair, U+D800"),
        (b'{"prompt": "1", "answer": "2", "more": ["\\udfff"]}', "half a surrogate pair, U+DFFF"),
        (b'{"prompt": "1", "answer": "2", "more": ' + b"[" * 500 + b"]" * 500 + b"}", "nested more than 100 levels"),
        (b'{"prompt": "1", "answer": "2", "more": ' + b"[" * 90_000 + b"]" * 90_000 + b"}", "nested more than 100"),
        (b'{"prompt": "1", "answer": "2", "answer": "3"}', "the key 'answer' is given twice"),
        (b'{"prompt": "1", "answer": NaN}', "the answer is nan"),
        (b'{"prompt": "1", "answer": 1e999}', "the answer is inf"),
        (b'{"prompt": "1", "answer": ' + b"1" * 5000 + b"}", "digits"),
        ('{"prompt": "1", "answer": "2"}'.encode("utf-16"), "not UTF-8"),
        (b'{"prompt": "' + b"x" * 20_000_000 + b'", "answer": "2"}', "20000000 characters, data.max_prompt_tokens is"),
        (b'{"' + b"k" * 1_000_000 + b'": 1}', "no column 'prompt'"),
    ],
)
def test_a_hostile_line_is_one_short_error(tmp_path, tokenizer, line, problem):
    path = tmp_path / "hostile.jsonl"
    path.write_bytes(b'{"prompt": "1", "answer": "2"}\n' + line)
    with pytest.raises(PromptFileError) as raised:
        source(path, tokenizer)
    message = str(raised.value)
    assert message.startswith(f"{path}: 1 malformed line\n  - line 2: ")
    assert problem in message
    assert len(message.encode()) < 1000


def test_an_error_about_thousands_of_malformed_lines_fits_on_a_screen(tmp_path, tokenizer):
    path = tmp_path / "hostile.jsonl"
    path.write_bytes(b"\n".join(b'{"%s%d": 1}' % (b"k" * 90, i) for i in range(0, 9000)))
    with pytest.raises(PromptFileError, match=r"9000 malformed lines(?s:.*)\n  - and lines \d") as raised:
        source(path, tokenizer)
    assert len(raised.value.violations) == 9000
    assert len(str(raised.value).encode()) < 4096


def test_missing_and_empty_files(tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"none\.jsonl: cannot read the prompt file: No such file"):
        source(tmp_path / "none.jsonl", tokenizer)
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match=r"empty\.jsonl: empty"):
        source(tmp_path / "empty.jsonl", tokenizer)


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([{"type": "image_url", "image_url": {"url": "a.png"}}], "unsupported content part 'image_url': the policy"),
        ([{"type": "text", "text": "a"}, {"type": "input_audio"}], "unsupported content part 'input_audio'"),
        (["a"], "unsupported content part 'str'"),
        ({"from": "human", "value": "a"}, "a message has 'from'; the known fields are role"),
        ({"weight": 1}, "a message has 'weight'; the known fields are role, content, name, tool_calls"),
        ({"tool_calls": [{"function": {"name": "f", "arguments": "{x"}}]}, "not JSON"),
        ({"tool_calls": [{"function": {"name": "f", "strict": True}}]}, "a call of a tool has 'strict'"),
        ({"tool_calls": 3}, "a call of a tool has 'int'"),
        ({"content": None}, "the prompt is NoneType, expected text"),
        ({"content": " "}, "the prompt is empty"),
        ({"role": "observer"}, "the chat template leaves out a message of role '"),
        ({"role": "human"}, "the last message has the role human; end with a question: remove an answer, or write us"),
        ({"role": "assistant"}, "the last message has the role assistant; end with a question"),
        ("[{'role': 'user', 'content': 'x'}]", "the prompt begins like messages, but cannot be read: not JSON"),
        ('[{"role": "user", "content": [{"type": "video"}]}]', "unsupported content part 'video'"),
        ('[{"from": "human", "value": "a"}]', "a message has 'from'"),
    ],
)
def test_messages_of_unknown_form_are_named(tmp_path, prompt, problem):
    users = "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}{{ m.content }}{% endif %}{% endfor %}"
    chat = load_tokenizer(save_character_model(tmp_path / "chat", chat_template=users))
    message = {"role": "user", "content": "a?"}
    turns = [message, message | (prompt if isinstance(prompt, dict) else {"content": prompt})]
    row = {"prompt": prompt if isinstance(prompt, str) else turns, "answer": 2}
    (tmp_path / "turns.jsonl").write_text(json.dumps(row))
    with pytest.raises(PromptFileError, match=problem):
        source(tmp_path / "turns.jsonl", chat, chat_template=True)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [(1e16, "may be a rounded integer"), (True, "bool"), ([1], "list"), (float("nan"), "nan"), (None, "NoneType")],
)
def test_answers_that_are_no_text_or_exact_number_are_named(tmp_path, tokenizer, answer, problem):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "answer": answer}))
    with pytest.raises(PromptFileError, match=problem):
        source(tmp_path / "rows.jsonl", tokenizer)


def test_repeated_prompts_are_counted(tmp_path, tokenizer):
    rows = [{"prompt": f"{a}+1=", "answer": answer} for a in (1, 1, 2) for answer in (2, 3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (file,) = source(tmp_path / "rows.jsonl", tokenizer).files
    assert file.describe() == f"6 prompts, only 2 different ones, from {tmp_path / 'rows.jsonl'}"


def test_templates(sums, tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"must contain \{prompt\}"):
        source(sums, tokenizer, prompt_template="prompt:")
    with pytest.raises(ValueError, match="no chat template"):
        source(sums, tokenizer, chat_template=True)
    chat = load_tokenizer(save_character_model(tmp_path / "chat", chat_template=CHAT))
    prompts = source(sums, chat, chat_template=True, prompt_template="{prompt} ?", shuffle=False)
    assert prompts.prompt(2).text == "<user>2+1= ?<bot>"
    assert chat.decode(prompts.prompt(2).token_ids) == "<user>2+1= ?<bot>"
    turns = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1="}]
    path = tmp_path / "turns.jsonl"
    path.write_text(json.dumps({"prompt": turns, "answer": 2}))
    assert source(path, chat, chat_template=True).prompt(0).text == "<system>add<user>1+1=<bot>"
