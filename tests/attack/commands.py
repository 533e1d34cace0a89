"""Commands run in this process, and checks of how they end."""

import contextlib
import io
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from dppo_megatron import cli
from tests.attack import cases

LONGEST_MESSAGE, LONGEST_PLAN = 4096, 65536  # bytes; the latter for a job's steps, of a command that succeeds
LONGEST_CPU_S, LONGEST_WALL_S = 5.0, 30.0  # the latter for a machine that does something else, too


def run(*arguments: str) -> str:
    """Return the problem of the answer of `dppo-megatron ARGUMENTS`; empty for a correct one."""
    out, err = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, ["dppo-megatron", *arguments]
    started, cpu = time.monotonic(), time.process_time()
    code: Any = "returned"
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        return traceback.format_exc()[-3000:]
    finally:
        sys.argv = before
    wall, cpu = time.monotonic() - started, time.process_time() - cpu
    message = err.getvalue()
    size = len(message.encode())
    if wall > LONGEST_WALL_S or cpu > LONGEST_CPU_S:
        return f"took {wall:.1f} s, {cpu:.1f} s of them computing: {message[:500]}"
    if size > (LONGEST_PLAN if code in (0, "returned") else LONGEST_MESSAGE) or "Traceback" in message + out.getvalue():
        return f"a message of {size} bytes: {message[:1000]}"
    if code in (0, "returned"):
        return ""
    if code == 1 and arguments[0] == "doctor" and out.getvalue():  # it found something
        return ""
    return "" if code in (1, 2) and message.strip() else f"exit code {code} with {message[:500]!r}"


def attack(usual: int, case: Callable[[int], str]) -> None:
    """Fail with the first problems of `cases(usual)` cases: case(number) returns one, or "" for a correct answer."""
    failures = {number: wrong for number in range(cases(usual)) if (wrong := case(number))}
    assert not failures, f"{len(failures)} cases, the first ones:\n" + "\n".join(
        f"--- {number}: {wrong}" for number, wrong in list(failures.items())[:8]
    )
