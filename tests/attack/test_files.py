"""Randomly changed tables, weight files and chat templates are read, or give one short error soon."""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import save_file

from dppo_megatron.config.schema import DataConfig
from dppo_megatron.data.prompts import PromptFile
from dppo_megatron.data.tokenizer import load_tokenizer
from dppo_megatron.errors import ExpectedError
from dppo_megatron.hf.safetensors_reader import SafetensorsDirectory
from tests.attack import generator
from tests.attack.commands import LONGEST_CPU_S, LONGEST_MESSAGE, LONGEST_WALL_S, attack
from tests.attack.hostile_values import change_text, change_tree
from tests.support.tokenizers import CHAT, save_character_model

ROWS = [
    {"prompt": [{"role": "user", "content": f"{i}+1=?"}], "answer": str(i), "more": {"x": [i, None], "y": b"\xff"}}
    for i in range(300)
]
PIECES = [
    "{% for i in range(99999) %}", "{% endfor %}", "{{ 'x' * 10 ** 9 }}", "{{ 10 ** 10 ** 9 }}",
    "{{ messages.append(1) }}",
    "{{ ''.__class__.__mro__ }}", "{{ '%999999999d' % 1 }}", "{{ '{:>99999999}'.format(1) }}", "{{ lipsum(9 ** 9) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ [0] * 10 ** 10 }}",
    "{{ range(99999) | list | tojson * 999 }}",
    "{{ raise_exception('\x1b' * 9999) }}", "{{ cycler.__init__.__globals__ }}", "{{ messages | tojson }}",
    "{{ \ud800 }}",
    "{{ 1 / 0 }}", "{{ none.x.y }}", "{% if add_generation_prompt %}", "{% endif %}", "{{ strftime_now('%c' * 9999) }}",
    "{% include 'x' %}", "{% set x = namespace(t='x') %}", "{% set x.t = x.t * 99 %}", "{{ '(' * 9999 }}",
    "{{" + "(" * 5000,
]  # fmt: skip


def outcome(read: Callable[[], object]) -> str:
    """Return the problem of reading a file; empty for rows, or for one clear error."""
    started, cpu = time.monotonic(), computed_s()
    message = ""
    try:
        read()
    except ExpectedError as error:
        message = str(error)
    except ValueError as error:
        return f"a ValueError without a remedy: {str(error)[:500]}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:500]}"
    wall, cpu = time.monotonic() - started, computed_s() - cpu
    if wall > LONGEST_WALL_S or cpu > LONGEST_CPU_S:
        return f"took {wall:.1f} s, {cpu:.1f} s of them computing: {message[:500]}"
    if len(message.encode(errors="surrogatepass")) > LONGEST_MESSAGE or (
        not message.isprintable() and "\x1b" in message
    ):
        return f"a message of {len(message)} characters: {message[:500]}"
    return ""


def computed_s() -> float:
    """Return the processor time of this process and its children. Of a child that ends, only the last case is new."""
    own = psutil.Process()
    times = [own.cpu_times(), *(child.cpu_times() for child in own.children())]
    return sum(time.user + time.system for time in times) + times[0].children_user + times[0].children_system


def damaged(content: bytes, at: random.Random) -> bytes:
    """Bytes, or little-endian integers as offsets and lengths are; some files are cut."""
    out = bytearray(content)
    for _ in range(at.choice([1, 1, 2, 4, 16])):
        where = at.randrange(len(out) - 8)
        size = at.choice([1, 1, 4, 8])
        number = at.choice([0, 1, 7, 255, 2**31 - 1, 2**32 - 1, at.getrandbits(64)])
        out[where : where + size] = (number % 256**size).to_bytes(size, "little")
    return bytes(out[: at.choice([len(out)] * 5 + [at.randrange(len(out))])])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(save_character_model(tmp_path_factory.mktemp("model"), chat_template=CHAT))


def table(path: Path, form: str) -> None:
    whole = pa.Table.from_pylist(ROWS)
    if form == "parquet":
        pyarrow.parquet.write_table(whole, path, row_group_size=100)
        return
    with pa.OSFile(str(path), "wb") as sink:
        make = pa.ipc.new_stream if form == "stream" else pa.ipc.new_file
        with make(sink, whole.schema) as out:
            out.write_table(whole, max_chunksize=100)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["parquet", "stream", "arrow"])
def test_every_damaged_table_gives_rows_or_one_clear_error(tmp_path, tokenizer, form):
    path = tmp_path / f"case.{'parquet' if form == 'parquet' else 'arrow'}"
    table(path, form)
    whole, config = path.read_bytes(), DataConfig(train=path, chat_template=True)

    def case(number: int) -> str:
        path.write_bytes(damaged(whole, generator(form, number)))
        return outcome(lambda: PromptFile(path, tokenizer, config))

    attack(60, case)


@pytest.mark.slow
def test_every_changed_chat_template_gives_text_or_one_clear_error(tmp_path, tokenizer, monkeypatch):
    path = tmp_path / "rows.jsonl"
    config = DataConfig(train=path, chat_template=True, max_prompt_tokens=64)  # longer text is refused untokenized
    path.write_text("".join(json.dumps({"prompt": f"{n}", "answer": "1"}) + "\n" for n in range(100)))

    def case(number: int) -> str:
        at = generator("template", number)
        template = CHAT
        for _ in range(at.choice([1, 1, 2, 3])):
            where = at.randrange(len(template) + 1)
            template = template[:where] + at.choice(PIECES) + template[where:]
        if at.random() < 0.3:
            template = change_text(template.encode(errors="surrogatepass"), at).decode(errors="replace")
        monkeypatch.setattr(tokenizer, "chat_template", template)
        wrong = outcome(lambda: PromptFile(path, tokenizer, config))
        return wrong and f"{template[:300]!r}: {wrong}"

    attack(60, case)


def test_every_changed_safetensors_file_gives_tensors_or_one_clear_error(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({name: torch.ones(2, 3) for name in ("a.weight", "b.weight", "c.weight")}, path)
    whole = path.read_bytes()
    size = 8 + int.from_bytes(whole[:8], "little")

    def read() -> list[torch.Tensor]:
        found = SafetensorsDirectory(tmp_path)
        return [found.tensor(name).sum() for name in found.tensors]

    def case(number: int) -> str:
        at = generator("safetensors", number)
        content, text = whole, whole[8:size]
        if at.random() < 0.7:
            tree = json.loads(text)
            change_tree(tree, at)
            text = json.dumps(tree).encode()
        if at.random() < 0.3:
            text = text.replace(b"b.weight", at.choice([b"a.weight", b"", b"\\u0000", b"c.weight"]))
        content = len(text).to_bytes(8, "little") + text + whole[size:]
        path.write_bytes(damaged(content, at) if at.random() < 0.5 else content)
        return outcome(read)

    attack(300, case)
