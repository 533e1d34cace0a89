"""Tables and chat templates that would end, hang or fill the process that reads them: one clear error each."""

import json
import struct
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from dppo_megatron.config.schema import DataConfig
from dppo_megatron.data import files, rows
from dppo_megatron.data.prompts import PromptFile, PromptFileError, render_chat
from dppo_megatron.data.tokenizer import load_tokenizer
from dppo_megatron.data.worker import ChatTemplateError
from tests.support.tokenizers import CHAT, save_character_model

TEXTS = pa.array([f"row{number:04}" for number in range(2000)])


def arrow(path, table) -> bytes:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as out:
        out.write_table(table)
    return path.read_bytes()


def changed_offsets(path):
    whole = arrow(path, pa.table({"prompt": TEXTS, "answer": TEXTS}))
    path.write_bytes(whole.replace(struct.pack("<3i", 0, 7, 14), struct.pack("<3i", 0, 1 << 30, 14)))


def no_utf8(path):
    whole = arrow(path, pa.table({"prompt": TEXTS, "answer": TEXTS}))
    path.write_bytes(whole.replace(b"row0001", b"\xff\xff\xff\xff\xff\xff\xff"))


def a_row_of_many_values(path):
    most = (1 << 31) - 1
    arrow(
        path, pa.table({"prompt": ["x"], "answer": ["y"], "more": pa.ListArray.from_arrays([0, most], pa.nulls(most))})
    )


def a_date_that_python_has_not(path):
    days = pa.array([2**31 - 1], pa.int32()).cast(pa.date32())
    arrow(path, pa.table({"prompt": ["x"], "answer": ["y"], "day": days}))


def many_rows_in_few_bytes(path):
    same = pa.DictionaryArray.from_arrays(np.zeros(2_000_000, np.int8), ["1+1="]).cast(pa.string())
    pyarrow.parquet.write_table(pa.table({"prompt": same, "answer": same}), path)
    assert path.stat().st_size < 100_000


def a_line_that_is_not_there(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize(
    ("make", "suffix", "problem"),
    [
        (changed_offsets, "arrow", r"cannot read the table: .*(offset|Offset)"),
        (no_utf8, "arrow", "cannot read the table: .*UTF8"),
        (a_row_of_many_values, "arrow", "takes more memory than half of the free memory|took too long; it may be"),
        (a_date_that_python_has_not, "arrow", "cannot read the table: "),
        (many_rows_in_few_bytes, "parquet", "its rows take more memory than half of the free memory; leave out rows"),
        (a_line_that_is_not_there, "jsonl", "bytes, more than half of the free memory; leave out"),
    ],
)  # fmt: skip
def test_a_hostile_file_is_one_clear_error(tmp_path, monkeypatch, make, suffix, problem):
    monkeypatch.setattr(files, "_SECONDS", 1.0)  # of computing, for a row that takes longer
    for module in (files, rows):
        monkeypatch.setattr(module, "memory_for_rows", lambda: 1 << 30, raising=False)
    path = tmp_path / f"hostile.{suffix}"
    make(path)
    with pytest.raises(PromptFileError, match=problem) as raised:
        PromptFile(path, None, DataConfig(train=path))
    assert str(raised.value).startswith(f"{path}: ")
    assert len(str(raised.value).encode()) < 1500


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
FATAL = {
    LOOP: "the template's process took too long",
    "{{ 10 ** (10 ** 9) }}": "the template's process took too long",
    "{{ 'x' * 2 ** 31 }}": "the template fills its memory",
    "{{ 'x' * 2 ** 25 }}": "the template writes 33554432 characters for one prompt",
    "{% set x = namespace(t='x') %}{% for i in range(60) %}{% set x.t = x.t * 2 %}{% endfor %}": "the template fills",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(save_character_model(tmp_path_factory.mktemp("model"), chat_template=CHAT))


@pytest.mark.parametrize("template", FATAL)
def test_a_template_without_an_end_or_a_measure_is_one_clear_error(tmp_path, tokenizer, monkeypatch, template):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}", "answer": "1"}) + "\n" for n in range(500)))
    monkeypatch.setattr(tokenizer, "chat_template", template)
    started = time.monotonic()
    limits = "; it may compute for 2 s and take 1 GiB: correct chat_template"
    with pytest.raises(ChatTemplateError, match=f"data.chat_template = true: {FATAL[template]}.*{limits}"):
        PromptFile(path, tokenizer, DataConfig(train=path, chat_template=True))
    assert time.monotonic() - started < 30  # 2 s of computing, on a machine that does something else, too


def test_a_template_that_ended_its_process_harms_no_other(tokenizer, monkeypatch):
    chat = [{"role": "user", "content": "1"}]
    assert render_chat(tokenizer, chat) == "<user>1<bot>"
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "chat_template", LOOP)
        with pytest.raises(ChatTemplateError):
            render_chat(tokenizer, chat)
        patch.setattr(tokenizer, "chat_template", "{{ raise_exception('no such role') }}")
        with pytest.raises(ValueError, match="the chat template rejects it: no such role"):
            render_chat(tokenizer, chat)
        patch.setattr(tokenizer, "chat_template", "{{ messages.__class__.__mro__ }}")  # the sandbox
        with pytest.raises(ValueError, match="the chat template rejects it: access to attribute '__class__'"):
            render_chat(tokenizer, chat)
    assert render_chat(tokenizer, chat) == "<user>1<bot>"


def test_long_and_many_chats_render_as_transformers_does(tokenizer):
    from dppo_megatron.data.worker import render_chats

    chats = [
        [{"role": "user", "content": f"{n}\U0001f600" + "x" * (3_000_000 if n % 40 == 3 else 1)}] for n in range(150)
    ]
    wanted = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    assert render_chats(tokenizer, chats) == wanted
