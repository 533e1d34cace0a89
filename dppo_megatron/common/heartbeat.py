"""Write this process's phase and current call to a file every few seconds, so that others see where it waits."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

INTERVAL_S = 5.0
BYTES = 1024  # file size; each write replaces all bytes
_OURS = re.compile(r".*/((?:dppo_)?megatron/.*)")
_WRAPPERS = ("without_cuda.py", "heartbeat.py")
_WAITS = ("distributed_c10d.py", "dppo_megatron/common/ranks.py")  # calls into these files wait for other ranks

_now: dict[str, Any] = {"phase": "load", "step": 0, "moves": 0}  # moves: the pieces of work that began or ended


@contextmanager
def in_phase(name: str) -> Iterator[None]:
    previous_phase = _now["phase"]
    moved(phase=name)
    try:
        yield
    finally:
        moved(phase=previous_phase)


def moved(**now: Any) -> None:
    """Record progress, such as a micro-batch or written bytes, and a new phase or step."""
    _now.update(now, moves=_now["moves"] + 1)


def start(path: Path) -> None:
    """Write `path` from a thread until the process ends. Call it in the main thread."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    threading.Thread(target=_beat, args=(file, threading.get_ident()), name="heartbeat", daemon=True).start()


def _beat(file: int, main: int) -> None:
    moves, since, process = -1, 0.0, {"host": socket.gethostname(), "pid": os.getpid()}
    while True:
        if moves != _now["moves"]:
            moves, since = _now["moves"], time.time()
        call, waits = _call_of(main)
        beat = process | _now | {"since": since, "time": time.time(), "call": call, "waits": waits}
        with contextlib.suppress(OSError):  # a full disk does not end the process here
            os.pwrite(file, json.dumps(beat).encode().ljust(BYTES), 0)
        time.sleep(INTERVAL_S)


def _call_of(thread: int) -> tuple[str, bool]:
    """Return a thread's current call and whether the call waits for other ranks.

    Example: `all_reduce (megatron/core/timers.py, line 41)` and True.
    """
    frame, waiting_call = sys._current_frames().get(thread), ""
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.endswith(_WAITS):
            waiting_call = waiting_call if waiting_call and name.startswith("_") else name
        elif (ours := _OURS.fullmatch(file)) and not file.endswith(_WRAPPERS):
            return f"{waiting_call or name} ({ours[1]}, line {frame.f_lineno})", bool(waiting_call)
        frame = frame.f_back
    return waiting_call, bool(waiting_call)
