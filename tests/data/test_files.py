"""Parquet, Hugging Face directories, columns by path, messages, over-long prompts, and several files by weight."""

import bz2
import datetime
import decimal
import gzip
import json
import lzma
from collections import Counter
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet
import pytest

from dppo_megatron.config.schema import DataConfig
from dppo_megatron.data.files import read_rows
from dppo_megatron.data.order import Mixture
from dppo_megatron.data.prompts import PromptFileError, PromptSource, parse_rows, renderer, training_prompts
from dppo_megatron.data.tokenizer import load_tokenizer
from tests.support.tokenizers import CHAT, save_character_model

DAPO = [
    {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": f"{i}+1=?"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(i + 1), "style": "rule"},
        "extra_info": {"index": f"id-{i}"},
    }
    for i in range(3000)
]  # as verl's parquet
SINGLE = pa.float32()
BY_PATH = {"answer_column": "reward_model.ground_truth", "shuffle": False}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return [load_tokenizer(save_character_model(directory / str(t), chat_template=t)) for t in (None, CHAT)]


def source(path, tokenizer, **settings):
    return PromptSource(path, tokenizer, DataConfig(train=path, **settings), 7)


def save_dataset(directory, rows, **state):
    """Saves rows as `datasets` does: streams in numbered files and a state that lists them."""
    directory.mkdir(parents=True)
    table = pa.Table.from_pylist(rows)
    names = []
    for number, part in enumerate((table.slice(0, 2), table.slice(2))):
        names.append({"filename": f"data-{number:05}-of-00002.arrow"})
        with (
            pa.OSFile(str(directory / names[-1]["filename"]), "wb") as sink,
            pa.ipc.new_stream(sink, part.schema) as out,
        ):
            out.write_table(part, max_chunksize=700)
    (directory / "state.json").write_text(json.dumps({"_data_files": names, **state}))
    (directory / "dataset_info.json").write_text("{}")


def test_every_form_gives_the_same_rows(tmp_path, tokenizers):
    table = pa.Table.from_pylist(DAPO)
    pyarrow.parquet.write_table(table, tmp_path / "one.parquet", row_group_size=700)
    for number in range(3):
        pyarrow.parquet.write_table(table.slice(1000 * number, 1000), tmp_path / f"train-0000{number}-of-00003.parquet")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in DAPO))
    save_dataset(tmp_path / "saved" / "train", DAPO)
    (tmp_path / "hub" / "data").mkdir(parents=True)
    pyarrow.parquet.write_table(table, tmp_path / "hub" / "data" / "train-00000-of-00001.parquet")
    with pa.OSFile(str(tmp_path / "file.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as out:
        out.write_table(table)
    names = ["one.parquet", "train-*.parquet", "rows.jsonl", "saved/train", "hub", "file.arrow"]
    for name in names:
        assert list(read_rows(tmp_path / name)) == list(enumerate(DAPO, 1)), name
    prompts = source(tmp_path / "one.parquet", tokenizers[0], **BY_PATH, prompt_column="prompt.0.content")
    prompt = prompts.prompt(2999)
    assert (prompt.row, prompt.text, prompt.answer, prompt.source) == (2999, "2999+1=?", "3000", "math_dapo")
    assert prompt.columns == DAPO[2999]
    assert source(tmp_path / "hub", tokenizers[1], chat_template=True, **BY_PATH).prompt(0).text == "<user>0+1=?<bot>"


CALLS = "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}"
SHOWN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}" + CALLS + "{% endfor %}"


def _used(name, arguments):
    call = {"id": name, "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "user", "content": "żółw 東京 😀"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": name},
        {"role": "user", "content": "and?"},
    ]


def _parts(*parts):
    return {"role": "user", "content": [*parts]}


SAME = {  # rows as JSON lines, of which tables change one half each: nulls, order of fields, types of numbers
    "calls": [
        {"answer": 3, "prompt": _used("add", {"a": 1, "b": 2.5, "deep": {"x": [1, None], "y": {"z": None}}})},
        {"prompt": _used("mul", {"b": 2, "a": None, "deep": {"z": 1.0}, "on": True, "names": ["é"]}), "answer": None},
        {"prompt": _used("now", {}), "answer": 4.0},
    ],
    "parts": [
        {"prompt": [_parts({"type": "text", "text": "a"}, {"type": "text", "text": "b"})], "answer": 0.5},
        {"prompt": [_parts({"type": "text", "text": "c", "image": None}) | {"name": "n"}], "answer": 2},
    ],
    "text": [
        {"prompt": json.dumps(_used("add", {"b": None, "a": 1})), "answer": "72.0", "data_source": None},
        {"prompt": '["role": no chat]', "answer": "007", "data_source": "x"},
    ],
    "dates": [
        {"prompt": "when", "answer": datetime.date(2024, 2, 29), "data_source": decimal.Decimal("2.00")},
        {"prompt": "how", "answer": datetime.date(2024, 3, 1), "data_source": decimal.Decimal("2.50")},
    ],
}  # fmt: skip


def parquet_table(path):
    pyarrow.parquet.write_table(pa.table({"prompt": ["a"], "answer": ["1"]}), path)


@pytest.mark.parametrize("name", SAME)
def test_json_lines_and_tables_give_the_same_tokens_and_answers(tmp_path, name):
    tokenizer = load_tokenizer(save_character_model(tmp_path / "model", chat_template=SHOWN))
    tokenizer.chat_template, rows = SHOWN, SAME[name]
    lines = [json.dumps(row, default=lambda v: float(v) if isinstance(v, decimal.Decimal) else str(v)) for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    save_dataset(tmp_path / "saved", rows)
    data, read = DataConfig(train=tmp_path, chat_template=True), {}
    for file in ("rows.jsonl", "rows.parquet", "saved"):
        parsed = [row for *_, row in parse_rows(tmp_path / file, data, renderer(tokenizer, data))]
        read[file] = [str(r) if isinstance(r, ValueError) else (r.text, r.answer, r.source) for r in parsed]
    assert read["rows.jsonl"] == read["rows.parquet"] == read["saved"]
    expected = {
        "calls": ('"function": {"name": "add", "arguments": {"a": 1, "b": 2.5, "deep": {"x": [1, null], ', "3"),
        "parts": ("<user>ab", "0.5"),
        "text": ('"arguments": {"a": 1}}', "72.0"),
        "dates": ("<user>when", "2024-02-29"),
    }[name]
    assert expected[0] in read["saved"][0][0]
    assert expected[1] == read["saved"][0][1]
    small = pa.table({"prompt": ["a", "b"], "answer": pa.array([0.1, 72], pa.float32())})
    pyarrow.parquet.write_table(small, tmp_path / "small.parquet")
    assert [row.answer for row in source(tmp_path / "small.parquet", tokenizer).files[0].rows] == ["0.1", "72"]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (SINGLE, 0.1),
        (pa.struct([("x", SINGLE), ("text", pa.string())]), {"x": 0.1, "text": None}),
        (pa.list_(SINGLE), [0.1, None]),
        (pa.large_list(SINGLE), [0.1]),
        (pa.dictionary(pa.int32(), SINGLE), 0.1),
        (pa.list_(SINGLE, 2), [0.1, 1e-8]),
        (pa.map_(pa.string(), SINGLE), {"x": 0.1}),
        (pa.list_(pa.struct([("x", pa.list_(SINGLE))])), [{"x": [0.1]}, None]),
    ],
    ids=str,
)
def test_floats_of_32_bits_have_their_shortest_text_at_any_depth(tmp_path, kind, value):
    stored = [*value.items()] if pa.types.is_map(kind) else value
    table = pa.table({"prompt": ["a", "b"], "answer": pa.array([stored, None], kind)})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
        out.write_table(table)
    for name in ("rows.parquet", "rows.arrow"):
        assert [columns["answer"] for _, columns in read_rows(tmp_path / name)] == [value, None]


def test_times_finer_than_pythons_do_not_matter_in_unused_columns(tmp_path, tokenizers):
    stamp = pa.timestamp("ns", "UTC")
    fine = {
        "at": pa.array([1_700_000_000_123_456_789], pa.timestamp("ns")),
        "took": pa.array([1], pa.duration("ns")),
        "clock": pa.array([1], pa.time64("ns")),
        "deep": pa.array([{"at": [1]}], pa.struct([("at", pa.list_(stamp))])),
    }
    table = pa.table({"prompt": ["a"], "answer": ["1"], **fine})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
        out.write_table(table)
    for name in ("rows.parquet", "rows.arrow"):
        (row,) = source(tmp_path / name, tokenizers[0]).files[0].rows
        assert row.columns["at"] == datetime.datetime(2023, 11, 14, 22, 13, 20, 123456)


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_a_column_that_occurs_twice_is_named(tmp_path, tokenizers, name):
    table = pa.Table.from_arrays(
        [pa.array(["a"]), pa.array(["b"]), pa.array(["1"])], names=["prompt", "prompt", "answer"]
    )
    if name == "rows.parquet":
        pyarrow.parquet.write_table(table, tmp_path / name)
    else:
        with pa.ipc.new_stream(str(tmp_path / name), table.schema) as out:
            out.write_table(table)
    with pytest.raises(PromptFileError, match="has the column 'prompt' twice; rename one"):
        source(tmp_path / name, tokenizers[0])


def test_a_decimal_has_its_digits_or_is_rejected(tmp_path, tokenizers):
    digits = {"12345678901234567890": True, "1.50": True, "12345678901234567890.5": False}
    for text, exact in digits.items():
        answers = pa.array([decimal.Decimal(text)])
        pyarrow.parquet.write_table(pa.table({"prompt": ["a"], "answer": answers}), tmp_path / "rows.parquet")
        if exact:
            assert (
                decimal.Decimal(source(tmp_path / "rows.parquet", tokenizers[0]).prompt(0).answer) == answers[0].as_py()
            )
        else:
            with pytest.raises(PromptFileError, match="store such numbers as integers or text"):
                source(tmp_path / "rows.parquet", tokenizers[0])


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.arrow"])
def test_a_pointer_of_git_lfs_is_named(tmp_path, tokenizers, name):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(PromptFileError, match="a Git LFS pointer, not the file; `git lfs pull`"):
        source(tmp_path / name, tokenizers[0])


@pytest.mark.parametrize(
    ("name", "write", "problem"),
    [
        *(
            (name, lambda path, pack=pack: path.write_bytes(pack(b'{"prompt": "a", "answer": "1"}\n')), problem)
            for name, pack, problem in (
                ("rows.jsonl.gz", gzip.compress, "its content is gzip; unpack it, and name the result"),
                ("rows.jsonl", gzip.compress, "its content is gzip; unpack it"),
                ("rows.parquet", gzip.compress, "its content is gzip; unpack it"),
                ("rows.bz2", bz2.compress, "its content is bzip2; unpack it"),
                ("rows.jsonl.xz", lzma.compress, "its content is xz; unpack it"),
                (
                    "rows.jsonl.zst",
                    lambda data: pa.compress(data, "zstd", asbytes=True),
                    "its content is zstd; unpack it",
                ),
                (
                    "rows.jsonl.lz4",
                    lambda data: pa.compress(data, "lz4", asbytes=True),
                    "its content is lz4; unpack it",
                ),
                ("rows.arrow", bytes, r"its content is JSON; rename it to \.jsonl"),
            )
        ),
        *(
            (name, parquet_table, r"its content is parquet; rename it to \.parquet")
            for name in ("rows", "a.jsonl", "b.arrow")
        ),
    ],
)
def test_a_file_with_another_format_than_its_name_is_named(tmp_path, tokenizers, name, write, problem):
    write(tmp_path / name)
    with pytest.raises(PromptFileError, match=rf"{name}: {problem}"):
        source(tmp_path / name, tokenizers[0])


def test_columns_by_path(tmp_path, tokenizers):
    row = {"a.b": "x", "a": {"b": "y", "c": [{"d": "z"}]}, "answer": 1}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    for name, text in [("a.b", "x"), ("a.c.0.d", "z")]:
        assert source(path, tokenizers[0], prompt_column=name).prompt(0).text == text
    in_list, in_row = r"its 'a\.c' has 0", r"it has 'a\.b', 'a', 'answer'"
    missing = {"a.x": "its 'a' has 'b', 'c'", "a.c.1.d": in_list, "a.c.-1": in_list, "a.b.c": r"its 'a\.b' has none"}
    for name, there in (missing | {"a.c.d": in_list, "": in_row, ".": in_row}).items():
        with pytest.raises(PromptFileError, match=rf"line 1: no column .*; {there}"):
            source(path, tokenizers[0], prompt_column=name)


def test_messages_without_a_chat_template(tmp_path, tokenizers):
    path = tmp_path / "turns.jsonl"
    turns = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1="}]
    path.write_text(json.dumps({"prompt": turns[1:], "answer": 2}))
    assert source(path, tokenizers[1], prompt_template="Q {prompt}").prompt(0).text == "Q 1+1="
    with pytest.raises(PromptFileError, match=r"the tokenizer has no chat template; .*column = prompt\.0\.content"):
        source(path, tokenizers[0])
    assert source(path, tokenizers[0], prompt_column="prompt.0.content").prompt(0).text == "1+1="
    path.write_text(json.dumps({"prompt": turns, "answer": 2}))
    with pytest.raises(PromptFileError, match=r"line 1: 2 messages; set data\.chat_template = true"):
        source(path, tokenizers[1])


def test_long_prompts_are_refused_dropped_or_truncated(tmp_path, tokenizers):
    path = tmp_path / "rows.jsonl"
    texts = ["short", "x" * 20 + "tail", "also", "y" * 30_000]
    path.write_text("".join(json.dumps({"prompt": text, "answer": 1}) + "\n" for text in texts))
    settings = {"max_prompt_tokens": 8, "shuffle": False}
    with pytest.raises(PromptFileError, match=r"line 2: 24 tokens.*\n.*line 4: 30000 characters"):
        source(path, tokenizers[0], **settings)
    prompts = source(path, tokenizers[0], overlong="drop", **settings)
    assert [(prompts.prompt(p).text, prompts.prompt(p).row) for p in range(3)] == [
        ("short", 0),
        ("also", 2),
        ("short", 0),
    ]
    assert prompts.files[0].describe().endswith("rows.jsonl; 2 dropped, of more than data.max_prompt_tokens = 8 tokens")
    path.write_text("".join(json.dumps({"prompt": text, "answer": 1}) + "\n" for text in texts[:3]))
    prompts = source(path, tokenizers[0], overlong="truncate", **settings)
    assert [prompts.prompt(p).text for p in range(3)] == ["short", "xxxxtail", "also"]
    assert len(prompts.prompt(1).token_ids) == 8
    assert prompts.files[0].describe().endswith("rows.jsonl; 1 truncated to 8 tokens")
    path.write_text(json.dumps({"prompt": "x" * 20, "answer": 1}))
    with pytest.raises(PromptFileError, match="every prompt has more than"):
        source(path, tokenizers[0], overlong="drop", **settings)


@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (1, 0.1), (0.3, 0.3, 0.4), (1, 1e-3), (5, 7, 11, 13)])
def test_files_alternate_as_their_weights_say(weights):
    mixture = Mixture(weights)
    seen: Counter[int] = Counter()
    for position in range(5000):
        file, place = mixture.at(position)
        assert place == seen[file]
        seen[file] += 1
        for number, weight in enumerate(weights):
            assert abs(seen[number] - (position + 1) * weight / sum(weights)) <= 1.5
    assert [Mixture(weights).at(p) for p in (4999, 17, 2500)] == [mixture.at(p) for p in (4999, 17, 2500)]


def test_several_files_are_one_order(tmp_path, tokenizers):
    for name, count in (("a", 4), ("b", 6)):
        rows = [{"prompt": f"{name}{i}", "answer": i, "data_source": name} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = [{"path": tmp_path / "b.jsonl", "weight": 0.5}]
    data = DataConfig(train=tmp_path / "a.jsonl", more=more)

    config = SimpleNamespace(run=SimpleNamespace(seed=7), data=data)
    prompts = training_prompts(config, tokenizers[0])
    assert len(prompts) == 10
    drawn = [prompts.prompt(position) for position in range(36)]
    assert Counter(prompt.source for prompt in drawn) == {"a": 24, "b": 12}
    assert Counter(prompt.text for prompt in drawn if prompt.source == "a") == {f"a{i}": 6 for i in range(4)}
    assert Counter(prompt.text for prompt in drawn if prompt.source == "b") == {f"b{i}": 2 for i in range(6)}
    assert {(p.text, p.row) for p in drawn} == {(f"a{i}", i) for i in range(4)} | {(f"b{i}", 4 + i) for i in range(6)}
    # The first file keeps the order of a run on only that file, and a run can resume anywhere.
    alone = source(tmp_path / "a.jsonl", tokenizers[0])
    assert [p.text for p in drawn if p.source == "a"] == [alone.prompt(p).text for p in range(24)]
    again = training_prompts(config, tokenizers[0])
    assert [again.prompt(p).text for p in (35, 3, 20)] == [drawn[p].text for p in (35, 3, 20)]


def test_directories_that_are_ambiguous_or_no_data_are_refused(tmp_path, tokenizers):
    table = pa.Table.from_pylist(DAPO[:5])

    def refused(path, why):
        with pytest.raises(PromptFileError, match=why):
            source(path, tokenizers[0], **BY_PATH)

    for split in ("train", "test"):
        save_dataset(tmp_path / "dict" / split, DAPO[:5])
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    refused(tmp_path / "dict", r"several splits; name one of .*dict/test, .*dict/train")
    save_dataset(tmp_path / "selected", DAPO[:5], _indices_data_files=[{"filename": "indices.arrow"}])
    refused(tmp_path / "selected", "flatten_indices")
    (tmp_path / "hub").mkdir()
    for split in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        pyarrow.parquet.write_table(table, tmp_path / "hub" / f"{split}.parquet")
    refused(tmp_path / "hub", r"several sets; name one of .*hub/test-\*\.parquet, .*hub/train-\*\.parquet")
    assert len(source(tmp_path / "hub" / "train-*.parquet", tokenizers[1], **BY_PATH)) == 10
    (tmp_path / "hub" / "train-00000-of-00002.parquet").rename(tmp_path / "hub" / ".train.parquet")  # hidden
    (tmp_path / "hub" / "test-00000-of-00001.parquet").rename(tmp_path / "test.parquet")
    assert len(source(tmp_path / "hub", tokenizers[1], **BY_PATH)) == 5
    (tmp_path / "hub" / "more.jsonl").write_text("{}")
    refused(tmp_path / "hub", r"several sets; name one of .*hub/more\.jsonl, .*hub/train-\*\.parquet")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "has no parquet")
    refused(tmp_path / "none-*.parquet", "no file matches")
    refused(tmp_path / "none.parquet", "No such file|cannot read")
    (tmp_path / "text.parquet").write_text("prompt,answer\n")
    refused(tmp_path / "text.parquet", "cannot read the table")
    whole = (tmp_path / "test.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    refused(tmp_path / "cut.parquet", "cannot read the table")
    (tmp_path / "text.arrow").write_bytes(b"\xff" * 100)
    refused(tmp_path / "text.arrow", "cannot read the table")
    pyarrow.parquet.write_table(pa.table({"prompt": ["1"], "answer": [None]}), tmp_path / "null.parquet")
    with pytest.raises(PromptFileError, match="1 malformed row\n  - row 1: the answer is NoneType"):
        source(tmp_path / "null.parquet", tokenizers[0])
