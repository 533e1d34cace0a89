import re
import signal
import subprocess
import sys

import pytest

from dppo_megatron.report.logs import MAX_WARNINGS, Warnings, last_lines, root_cause

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"


def run(tmp_path, body, *, stderr=subprocess.PIPE):
    """Runs `body` in a process of its own: logging is set up once per process."""
    code = (
        "import logging, sys\n"
        "from pathlib import Path\n"
        "from dppo_megatron.report.logs import setup_logging\n"
        f"setup_logging('trainer', Path({str(tmp_path)!r}))\n"
        f"log = logging.getLogger('here')\n{body}"
    )
    return subprocess.run([sys.executable, "-c", code], stderr=stderr, text=True, check=False)


def test_lines_carry_time_and_process_and_are_appended(tmp_path):
    run(tmp_path, "log.info('hello')")
    run(tmp_path, "log.warning('careful')")
    lines = (tmp_path / "logs" / "trainer.log").read_text().splitlines()
    assert len(lines) == 2
    assert re.fullmatch(rf"{STAMP} trainer INFO here: hello", lines[0])
    assert re.fullmatch(rf"{STAMP} trainer WARNING here: careful", lines[1])


def test_stderr_gets_warnings_only_and_nothing_twice(tmp_path):
    result = run(tmp_path, "log.info('hello'); log.warning('careful')")
    assert "careful" in result.stderr
    assert "hello" not in result.stderr
    path = tmp_path / "logs" / "trainer.log"
    path.unlink()
    with path.open("a") as file:  # a launcher that redirects into the same file
        run(tmp_path, "log.warning('careful')", stderr=file)
    assert path.read_text().count("careful") == 1


def test_uncaught_exceptions_of_any_thread_land_in_the_log(tmp_path):
    body = (
        "import threading\n"
        "def work(): raise KeyError('in a thread')\n"
        "t = threading.Thread(target=work, name='loader'); t.start(); t.join()\n"
        "raise ValueError('at the top')"
    )
    assert run(tmp_path, body).returncode == 1
    text = (tmp_path / "logs" / "trainer.log").read_text()
    assert "uncaught exception in loader" in text
    assert "KeyError: 'in a thread'" in text
    assert text.rstrip().endswith("ValueError: at the top")


def test_a_fatal_signal_leaves_a_traceback(tmp_path):
    result = run(tmp_path, "import os\ndef stuck(): os.abort()\nstuck()")
    assert result.returncode == -signal.SIGABRT
    text = (tmp_path / "logs" / "trainer.log").read_text()
    assert "Fatal Python error: Aborted" in text
    assert "in stuck" in text


def test_last_lines_skip_blanks_colours_and_redrawn_states(tmp_path):
    path = tmp_path / "engine.log"
    path.write_bytes(b"first\n\n  \n\x1b[31mred\x1b[0m\r\n 0%\r50%\r100%\n\xff\nlast\n\n\n")
    assert last_lines(path, 4) == ["red", "100%", "\ufffd", "last"]
    assert last_lines(path, 1) == ["last"]
    assert last_lines(path, 0) == []
    assert last_lines(path)[0] == "first"
    assert last_lines(tmp_path / "absent") == []


def test_last_lines_of_a_large_file_reach_over_blocks(tmp_path):
    path = tmp_path / "engine.log"
    path.write_text("".join(f"{index:06d} {'x' * 90}\n" for index in range(5000)) + "\n" * 70_000)
    assert [line[:6] for line in last_lines(path, 3)] == ["004997", "004998", "004999"]
    path.write_text("y" * 200_000 + "\nend")
    assert last_lines(path, 2) == ["y" * 200_000, "end"]


CORE = "(EngineCore_DP0 pid=42) ERROR 11-24 22:10:11 [core.py:708] "
EARLIER = "ValueError: of an earlier start\n2026-11-24 engine-0 INFO x: starting the server of node 0: vllm\n"
VLLM = f"""{CORE}EngineCore failed to start.
{CORE}Traceback (most recent call last):
{CORE}  File "core.py", line 1, in run
{CORE}ValueError: No available memory for the cache blocks.
(EngineCore_DP0 pid=42) Process EngineCore_DP0:
(APIServer pid=7)   File "api.py", line 2
(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}
EngineStartError: the server at http://x ended while starting (exit code 1)
"""
SGLANG = """[2026-11-24 22:10:11 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 1, in run
\x1b[31mtorch.OutOfMemoryError: CUDA out of memory.\x1b[0m
[2026-11-24 22:10:11] Received sigquit from a child process. It usually means the child failed.
"""
HERE = "(here: engine.kv_cache_bytes, engine.max_model_len)"
PYDANTIC = "pydantic_core.ValidationError: 1 validation error for X\n  Value error, too long [type=x]\n"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (EARLIER + VLLM, f"ValueError: No available memory for the cache blocks. {HERE} ({{}}, line 6)"),
        (SGLANG, "torch.OutOfMemoryError: CUDA out of memory. ({}, line 3)"),
        (
            PYDANTIC,
            "pydantic_core.ValidationError: 1 validation error for X Value error, too long [type=x] ({}, line 1)",
        ),
        (
            "usage: x\nvllm: error: unrecognized arguments: --no\n",
            "vllm: error: unrecognized arguments: --no ({}, line 2)",
        ),
        (
            "NoReward: step 0: every reward failed; correct it\n",
            "NoReward: step 0: every reward failed; correct it ({}, line 1)",
        ),
        ("a.b.TrainingDiverged: loss is nan\n", "a.b.TrainingDiverged: loss is nan ({}, line 1)"),
        (EARLIER + "all is well\nUserWarning: slow\n", None),
    ],
)
def test_the_cause_of_an_engine_that_does_not_start(tmp_path, text, cause):
    log = tmp_path / "engine-0.log"
    assert root_cause(log) is None
    log.write_text(text)
    assert root_cause(log) == (cause and cause.format(log))


def test_warnings_are_shown_once_each_whatever_their_numbers(tmp_path):
    log, absent = tmp_path / "orchestrator.log", tmp_path / "trainer-0.log"
    line = "2026-11-24 22:39:31,123 orchestrator {} dppo_megatron.x: {}\n"
    log.write_text(line.format("WARNING", "of an earlier attempt"))
    warnings = Warnings([log, absent])
    assert warnings.poll() == []
    with log.open("a") as file:
        for level, text in (("WARNING", "row 1 failed (raised): KeyError"), ("INFO", "fine"), ("ERROR", "ends")):
            file.write(line.format(level, text))
        file.write(line.format("WARNING", "row 22 failed (raised): KeyError") + line.format("WARNING", "cut")[:-2])
    assert warnings.poll() == ["orchestrator warns: row 1 failed (raised): KeyError"]
    with log.open("a") as file:
        file.write("t\n")
    assert warnings.poll() == ["orchestrator warns: cut"]
    absent.write_text("".join(line.format("WARNING", "x" * n) for n in range(1, 2 * MAX_WARNINGS)))
    assert len(warnings.poll()) == MAX_WARNINGS - 2
    assert warnings.poll() == []
