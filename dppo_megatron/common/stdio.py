"""Let a command finish although the reader of standard output or error has ended."""

from __future__ import annotations

import io
import os
import shutil
import sys
import textwrap
from typing import Any, TextIO


class _Raw(io.FileIO):
    """Discards output, also from processes started later, once the pipe's reader has ended."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            discard = os.open(os.devnull, os.O_WRONLY)
            os.dup2(discard, self.fileno())
            os.close(discard)
            return len(memoryview(data).cast("B"))


def at_words(text: str, stream: TextIO) -> str:
    """Return the text with long lines broken before words where a terminal would break them inside words."""
    if not stream.isatty():
        return text
    wrapper = textwrap.TextWrapper(shutil.get_terminal_size().columns, subsequent_indent="  ")
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return "\n".join(map(wrapper.fill, text.splitlines()))


def outlive_readers() -> None:
    """Replace `sys.stdout` and `sys.stderr`, so that `train | head` trains to its end and writes its report.

    File names may have characters that UTF-8 lacks; they are written with backslashes. Streams that are not files, as
    in tests, stay.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
            if isinstance(stream.buffer, io.BufferedWriter | io.FileIO):  # FileIO by PYTHONUNBUFFERED
                raw: Any = _Raw(stream.fileno(), "w", closefd=False)
                writer = raw if stream.write_through else io.BufferedWriter(raw)
                options: Any = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
                setattr(sys, name, io.TextIOWrapper(writer, stream.encoding, stream.errors, **options))
