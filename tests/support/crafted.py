"""Pickles that run code in the process that reads them."""

import os
import pickle
from pathlib import Path


class RunsCode:
    """Pickled, it makes the file `trace` when it is read."""

    def __init__(self, trace: Path):
        self._command = f"touch {trace}"

    def __reduce__(self):
        return os.system, (self._command,)


def named_when_read_again(command: str, harmless: tuple[str, str], function: tuple[str, str]) -> bytes:
    """A pickle of None that names `harmless` when it is first read in a process, and os.system, with `command`, when it
    is read again.

    It keeps the name in an attribute of `function`, which looks keys up in its attribute `cache`; with another, a
    `__setstate__`, the function lets nothing more be set on it.
    """

    def text(value: str) -> bytes:
        return pickle.BINUNICODE + len(value.encode()).to_bytes(4, "little") + value.encode()

    def named(module: str, name: str) -> bytes:
        return text(module) + text(name) + pickle.STACK_GLOBAL

    def filled(**values: bytes) -> bytes:
        return pickle.EMPTY_DICT + b"".join(text(key) + value + pickle.SETITEM for key, value in values.items())

    def keep(place: tuple[str, str], **more: bytes) -> bytes:
        cache = filled(module=text(place[0]), name=text(place[1]))
        return named(*function) + filled(cache=cache, **more) + pickle.BUILD + pickle.POP

    def kept(key: str) -> bytes:
        return named(*function) + text(key) + pickle.TUPLE1 + pickle.REDUCE

    call = kept("module") + kept("name") + pickle.STACK_GLOBAL + text(command) + pickle.TUPLE1 + pickle.REDUCE
    after = keep(("os", "system"), __setstate__=named(*harmless))
    return pickle.PROTO + b"\x04" + keep(harmless) + call + pickle.POP + after + pickle.NONE + pickle.STOP
