"""Writes a plain log file per process, and reads the last lines when a process has died."""

from __future__ import annotations

import faulthandler
import itertools
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

from dppo_megatron.errors import bounded

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f]")
SERVER_START = "starting the server of node"  # an engine's log also contains the logs of earlier servers
SERVER_READY = "answers at"
SERVER_STOP = "asks the server to end"  # later lines are not errors
_PREFIX = re.compile(r"^(\(\w+ pid=\d+\) )?((ERROR|CRITICAL) [^\]]*\] )?")  # prefix of lines from vLLM's processes
# Also exceptions of this package with names of several words, such as NoReward.
_EXCEPTION = re.compile(r"^[\w.]*(Error|Exception|Timeout)\b|^(\w+\.)*([A-Z][a-z]+){2,}(?<!Warning): |^\S+: error: ")
_CONSEQUENCE = re.compile(
    r"root cause|^(EngineStart|EngineDead|BrokenPipe|ConnectionReset|Cancelled)Error|^ServiceTimeout"
)
_CACHE = re.compile(r"cache blocks|kv.?cache|gpu_memory_utilization", re.IGNORECASE)  # the servers' option names
_WARNING = re.compile(r"^\d{4}-\d\d-\d\d [\d:,]+ (\S+) WARNING (?!py\.warnings)\S+: (.*)$", re.MULTILINE)
SEARCHED_BYTES = 64 * 1024
# Matches the last line of a traceback, our and the servers' log levels, and messages about killed processes.
_ERROR_LINE = re.compile(
    r"^[\w.]*(Error|Exception|Timeout|Diverged|Frozen)\b|\b(ERROR|CRITICAL)\b|\bKilled\b|Segmentation fault"
)
MAX_WARNINGS = 20  # limit for the launcher's output; the logs have all
_MAX_READ = 4 << 20
_TALKATIVE = ("httpx", "httpcore", "megatron")  # they log a line per request or a page per optimizer


def setup_logging(process_name: str, run_dir: Path) -> None:
    """Send this process's log records to RUN/logs/<process_name>.log. Call it early.

    A terminal on stderr gets all records too. Any other stderr gets only warnings, or nothing if it is the log file
    itself. An uncaught exception in any thread or a fatal signal (segmentation fault, abort) writes a traceback to the
    log.
    """
    path = run_dir / "logs" / f"{process_name}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    file_handler = logging.FileHandler(path, mode="a", encoding="utf-8", errors="backslashreplace")
    assert file_handler.stream is not None  # it is open already
    faulthandler.enable(file_handler.stream)
    handlers: list[logging.Handler] = [file_handler]
    if not _is_stderr(path):
        screen = logging.StreamHandler(sys.stderr)
        screen.setLevel(logging.INFO if sys.stderr.isatty() else logging.WARNING)
        handlers.append(screen)
    form = f"%(asctime)s {process_name} %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, handlers=handlers, force=True)
    logging.captureWarnings(True)
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread


def append_line(path: str | Path, text: str) -> None:
    """Append a line with date and time, for a process that logs too rarely to keep a file open."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")


def last_lines(path: str | Path, n: int = 20) -> list[str]:
    """Return the last `n` lines with text, without control codes; an empty list if there is no file.

    Reads at most the last 4 MiB. If carriage returns redraw a line (a progress bar), only the last state is returned.
    """
    try:
        if not Path(path).is_file():  # opening a pipe would block
            return []
        with Path(path).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _MAX_READ))
            last_first = reversed(file.read().split(b"\n"))
    except OSError:
        return []
    texts = (plain_text(line.decode("utf-8", "replace")) for line in last_first)
    return list(itertools.islice(filter(None, texts), n))[::-1]


def root_cause(path: Path) -> str | None:
    """Return the last exception in a log as `TEXT (PATH, line N)`, or None without an exception.

    Skips exceptions of earlier servers, and exceptions that only report the failure of another process.
    """
    text, at = "", 0
    if not path.is_file():
        return None
    with path.open(errors="replace") as file:
        for number, line in enumerate(file, 1):
            line = _PREFIX.sub("", plain_text(line))
            if SERVER_START in line:
                text = ""
            elif _EXCEPTION.match(line) and not _CONSEQUENCE.search(line):
                text, at = line, number
            elif text and number <= at + 2 and line.startswith("  ") and 'File "' not in line:  # continues the message
                text += f" {line.strip()}"
    hint = " (here: engine.kv_cache_bytes, engine.max_model_len)" if _CACHE.search(text) else ""
    return f"{bounded(text, 1000)}{hint} ({path}, line {at})" if text else None


def last_error(lines: Sequence[str]) -> str | None:
    """Return the last line that looks like an error.

    Ignores errors from a server that was asked to end, and errors from a start after which the server answered.
    """
    error, previous_error, ends = None, None, False
    for line in lines:
        if SERVER_START in line:
            previous_error = error
        elif SERVER_READY in line:
            error = previous_error
        ends = SERVER_STOP in line or (ends and SERVER_START not in line)
        if not ends and _ERROR_LINE.search(line):
            error = line
    return error


class NewErrors:
    """Finds errors that appear in a run's logs from now on. Ignores the lines of earlier attempts."""

    def __init__(self, logs: Path):
        self._logs = logs
        self._sizes = {path: path.stat().st_size for path in logs.glob("*.log")}

    def first_of(self, step: str) -> str | None:
        """Return the last error line in the log of `step`, or in the log of the rank that failed first.

        When a rank fails, the other ranks report errors later. So among the logs with errors, the failed rank's log has
        the oldest modification time.
        """
        logs = [path for names in ("", "-*", ".*") for path in self._logs.glob(f"{step}{names}.log")]
        for log in sorted(logs, key=lambda path: path.stat().st_mtime):
            if (line := last_error(self._new_lines(log))) is not None:
                return f"{log.stem}: {line}"
        return None

    def _new_lines(self, log: Path) -> list[str]:
        with log.open("rb") as file:
            file.seek(max(self._sizes.get(log, 0), log.stat().st_size - SEARCHED_BYTES))
            return [plain_text(line) for line in file.read().decode("utf-8", "replace").split("\n")]


class Warnings:
    """Collects new warnings from process logs. Warnings that differ only in numbers are collected once."""

    def __init__(self, logs: Iterable[Path]):
        self._offsets = {log: log.stat().st_size if log.is_file() else 0 for log in logs}
        self._kinds: set[str] = set()

    def poll(self) -> list[str]:
        """Return `PROCESS warns: TEXT` for new warnings, at most `MAX_WARNINGS` in all. Idle calls cost a `stat`."""
        warnings = []
        for log, offset in self._offsets.items():
            if not log.is_file() or log.stat().st_size <= offset:
                continue
            with log.open("rb") as file:
                file.seek(offset)
                data = file.read(_MAX_READ)
            self._offsets[log] = offset + (data.rfind(b"\n") + 1 or (len(data) if len(data) == _MAX_READ else 0))
            for match in _WARNING.finditer(data[: self._offsets[log] - offset].decode(errors="replace")):
                kind = re.sub(r"\d+", "", match[2])
                if kind not in self._kinds and len(self._kinds) < MAX_WARNINGS:
                    self._kinds.add(kind)
                    warnings.append(f"{match[1]} warns: {bounded(plain_text(match[2]), 500)}")
        return warnings


def plain_text(text: str) -> str:
    """Return a line of another program's output without colors, control characters and trailing blanks."""
    visible = text.rstrip("\r\n ").rsplit("\r", 1)[-1]
    return _CONTROL.sub("", visible).rstrip()


def duration(seconds: float) -> str:
    """Format seconds as h:mm:ss."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}"


def _is_stderr(path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(sys.stderr.fileno()), path.stat())
    except (OSError, ValueError, AttributeError):  # closed, or replaced by an object without a file
        return False


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        logging.getLogger().info("interrupted")
    else:
        logging.getLogger().critical("uncaught exception", exc_info=(kind, error, trace))


def _log_uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None:
        name = args.thread.name if args.thread else "a thread"
        logging.getLogger().critical(
            "uncaught exception in %s", name, exc_info=(args.exc_type, args.exc_value, args.exc_traceback)
        )
