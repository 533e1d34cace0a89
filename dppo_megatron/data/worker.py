"""Read tables and render chat templates in a worker, so that a harmful file can only crash or fill that process."""

from __future__ import annotations

import pickle
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dppo_megatron.common.worker import Answer, Worker, WorkerError, confine
from dppo_megatron.errors import ExpectedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WAIT_S = 300.0  # longest wait for a file system that stalls; computing time in the process has a separate limit
_ROWS, _CHATS = 1024, 64  # most rows and chats in a reply
_ROW_BYTES = 1000  # memory per prompt in addition to the text: objects and tokens
_MAX_CHARACTERS = 1 << 23  # limit for a rendered prompt, and approximately for a reply
_CHATS_S, _CHATS_MEMORY = 2.0, 1 << 30
_idle: dict[str, list[Worker]] = {}


class ChatTemplateError(ExpectedError, ValueError):
    """The template does not terminate, or needs more memory than a text can need."""


@contextmanager
def borrowed(answer: Any, memory: int) -> Iterator[Worker]:
    """Yield an idle or new worker for a class in this module. An error ends the worker. memory: byte limit."""
    idle = _idle.setdefault(answer.__name__, [])
    worker = idle.pop() if idle else None
    started = False
    if worker is None or not worker.usable:
        hello = {"answer": answer.__name__, "memory": memory}
        worker, started = Worker(__name__, hello, "table" if answer is Tables else "template", memory), True
    try:
        if started:
            worker.load()
        yield worker
    except BaseException:
        worker.end()
        raise
    idle.append(worker)


def render_chats(
    tokenizer: PreTrainedTokenizerBase,
    chats: Sequence[Any],
    tools: Sequence[dict[str, Any]] = (),
    *,
    answered: bool = False,
) -> list[str | ValueError]:
    """Render each chat to the model input text, up to the start of the answer; a problem gives an error instead.

    A chat that is already an error is returned unchanged. tools: for chat templates. answered: the answer is the last
    message. Raises `ChatTemplateError`.
    """
    out: list[str | ValueError] = []
    try:
        template_kwargs: dict[str, Any] = {"tools": list(tools) or None, "add_generation_prompt": not answered}
        template_kwargs |= tokenizer.special_tokens_map
        template_kwargs["chat_template"] = tokenizer.get_chat_template(None, tools=template_kwargs["tools"])
        with borrowed(Templates, _CHATS_MEMORY) as worker:
            while len(out) < len(chats):
                request = template_kwargs, chats[len(out) : len(out) + _CHATS]
                parts = worker.ask(request, WAIT_S, "for the chat template", list[Any])
                if isinstance(parts[0], str):
                    raise ValueError(parts[0])
                out += [text if problem is None else ValueError(problem) for text, problem in parts]
    except (WorkerError, ValueError) as error:
        limits = f"it may compute for {_CHATS_S:g} s and take {_CHATS_MEMORY >> 30} GiB"
        raise ChatTemplateError(
            f"data.chat_template = true: {error}; {limits}: correct chat_template in the model's "
            "tokenizer_config.json, or set data.chat_template to false"
        ) from None
    return out


def load(hello: dict[str, Any]) -> tuple[None, Answer]:
    """Instantiate the class that `borrowed` names, in the worker process."""
    return None, globals()[hello["answer"]](hello["memory"])


class Tables:
    """Answers requests for table rows, an Arrow stream with a single batch at a time.

    First rows: the request is (file, computing seconds, byte limit of the rows or None).
    Next rows: the request is (None, computing seconds, None).
    The answer is empty at the table end. After a problem it has the problem instead of rows.
    """

    def __init__(self, memory: int):
        import pyarrow.parquet

        self._pa = pyarrow
        self._batches: Iterator[bytes] = iter(())
        confine(memory)

    def __call__(self, request: bytes) -> list[Any] | bytes:
        file, seconds, limit_bytes = pickle.loads(request)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            if file is not None:
                self._batches, self._left_bytes = self._read(file), limit_bytes
            return next(self._batches, [])
        except MemoryError:
            return ["takes more memory than half of the free memory; write it in smaller row groups"]
        except Exception as error:  # depending on the damage, pyarrow raises any error
            return [getattr(error, "strerror", None) or str(error)]
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _read(self, file: Path) -> Iterator[bytes]:
        if file.suffix == ".parquet":
            with self._pa.parquet.ParquetFile(file) as table:
                self._hold(table.metadata.num_rows * _ROW_BYTES)
                yield from map(self._checked, table.iter_batches(_ROWS))
            return
        with self._pa.memory_map(str(file)) as source:
            for batch in self._arrow_batches(source):
                self._hold(len(batch) * _ROW_BYTES)
                batch.validate(full=True)
                yield from (self._checked(batch.slice(first, _ROWS)) for first in range(0, len(batch), _ROWS))

    def _arrow_batches(self, source: Any) -> Iterator[Any]:
        """Yield the batches: `datasets` writes streams, others write Arrow files."""
        try:
            yield from self._pa.ipc.open_stream(source)
        except self._pa.ArrowInvalid:
            source.seek(0)
            reader = self._pa.ipc.open_file(source)
            yield from map(reader.get_batch, range(reader.num_record_batches))

    def _checked(self, batch: Any) -> bytes:
        """Return a batch as a stream. Creates the rows first, within the limits: few bytes may expand to any size."""
        batch.validate(full=True)
        if twice := [name for name, count in Counter(batch.schema.names).items() if count > 1]:
            raise ValueError(f"has the column {twice[0]!r} twice; rename one")
        for number, field in enumerate(batch.schema):
            text, plain = (self._plain(field.type, float32) for float32 in (self._pa.string(), self._pa.float64()))
            if plain != field.type:  # a float becomes text first, or 0.1 would become 0.10000000149
                batch = batch.set_column(number, field.name, batch.column(number).cast(text, safe=False).cast(plain))
        batch.to_pylist(maps_as_pydicts="strict")
        sink = self._pa.BufferOutputStream()
        with self._pa.ipc.new_stream(sink, batch.schema) as out:
            out.write_batch(batch)
        self._hold(sink.tell())
        return sink.getvalue().to_pybytes()

    def _plain(self, kind: Any, float32: Any) -> Any:
        """Replace, in an Arrow type, nanoseconds by microseconds (Python's finest unit) and float32 by `float32`."""
        pa, types = self._pa, self._pa.types
        if types.is_timestamp(kind) and kind.unit == "ns":
            return pa.timestamp("us", kind.tz)
        if types.is_duration(kind) and kind.unit == "ns":
            return pa.duration("us")
        if types.is_dictionary(kind):
            return self._plain(kind.value_type, float32)
        if types.is_struct(kind):
            return pa.struct([field.with_type(self._plain(field.type, float32)) for field in kind])
        if types.is_map(kind):
            return pa.map_(*(f.with_type(self._plain(f.type, float32)) for f in (kind.key_field, kind.item_field)))
        if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
            inner = kind.value_field.with_type(self._plain(kind.value_type, float32))
            return (
                pa.large_list(inner) if types.is_large_list(kind) else pa.list_(inner, getattr(kind, "list_size", -1))
            )
        return float32 if types.is_float32(kind) else pa.time64("us") if types.is_time64(kind) else kind

    def _hold(self, size: int) -> None:
        if self._left_bytes is not None:
            self._left_bytes -= size
            if self._left_bytes < 0:
                raise ValueError("its rows take more memory than half of the free memory; leave out rows or columns")


class Templates:
    """Answers (template variables, chats) with (text, problem) for the first chats, as many as fit.

    If all other chats would fail too, the answer is the problem as text.
    """

    def __init__(self, memory: int):
        from transformers.utils.chat_template_utils import render_jinja_template

        self._render = render_jinja_template
        confine(memory)

    def __call__(self, request: bytes) -> list[Any]:
        template_kwargs, chats = pickle.loads(request)
        out: list[Any] = []
        signal.setitimer(signal.ITIMER_PROF, _CHATS_S)
        while len(out) < len(chats) and sum(len(text) for text, _ in out) < _MAX_CHARACTERS:
            chat, text, problem = chats[len(out)], "", None
            try:
                if isinstance(chat, ValueError):
                    raise chat
                text = self._render([list(chat)], **template_kwargs)[0][0]
            except MemoryError:
                return ["the template fills its memory"]
            except Exception as error:  # templates raise errors, e.g. for unknown roles
                problem = str(error) if error is chat else f"the chat template rejects it: {str(error)[:500]}"
            if len(text) > _MAX_CHARACTERS:
                return [f"the template writes {len(text)} characters for one prompt"]
            out.append((text, problem))
        signal.setitimer(signal.ITIMER_PROF, 0)
        return out
