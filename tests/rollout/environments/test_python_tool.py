"""Programs that try to get out of the sandbox, and sandboxes with a hole, which are refused."""

import os
import socket
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from dppo_megatron.rollout.environments import EnvironmentFailed, python_tool
from dppo_megatron.rollout.environments.python_tool import Python, SandboxError
from dppo_megatron.rollout.environments.tools import Tools
from dppo_megatron.rollout.environments.worker import _Host

SMALL = {"cpu_s": 1, "wall_s": 20.0, "memory_mb": 256, "processes": 4, "files_mb": 2, "files": 8, "output": 400}


@pytest.fixture(scope="module")
def python():
    run = python_tool.python_tool(**SMALL)
    return lambda code: run(textwrap.dedent(code))


def attempt(code: str) -> str:
    """Return a program that prints the error of `code`."""
    return f"try:\n{textwrap.indent(textwrap.dedent(code), '    ')}\nexcept BaseException as error: print(repr(error))"


def test_a_program_runs(python):
    assert python("print(6 * 7)") == "42\n"
    assert python("x = 1") == "[it printed nothing]"
    assert python("1 / 0").endswith("ZeroDivisionError: division by zero\n\n[exit code 1]")


@pytest.mark.slow
def test_packages_are_there_and_nothing_is_kept(python):
    assert python("import numpy; print(numpy.arange(4).sum())") == "6\n"
    assert python("open('kept', 'w').write('x'); import os; print(os.listdir())") == "['kept']\n"
    assert python("import os; print(os.listdir(), os.getcwd())") == "[] /sandbox\n"


@pytest.mark.slow
def test_time_is_limited(python):
    assert python("while True: pass") == "[ended at the limit of its time on the CPU]"
    brief = python_tool.python_tool(**{**SMALL, "wall_s": 4.0})
    started = time.monotonic()
    assert brief("import time; print('a', flush=True); time.sleep(60)") == "a\n\n[ended after 4 s]"
    assert time.monotonic() - started < 15


@pytest.mark.slow
def test_files_are_limited(python):
    assert "File too large" in python(attempt("open('big', 'wb').truncate(4 << 20)"))
    two = "for name in 'ab':\n    with open(name, 'wb') as file: file.write(bytes(3 << 19))"
    assert "No space left" in python(attempt(two))
    assert "No space left" in python(attempt("for number in range(10): open(str(number), 'w').close()"))


@pytest.mark.slow
def test_output_is_cut(python):
    said = python("print('x' * 10**7)")
    assert said.startswith("x" * 400 + "\n[cut after 400 characters]")
    assert len(said) < 500


@pytest.mark.slow
def test_files_of_the_machine_are_not_there(python, tmp_path, monkeypatch):
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    monkeypatch.setenv("RUN_SECRET", "s3cret")
    for path in (secret, "/etc/passwd", "/proc/self/environ", Path(__file__)):
        assert Path(path).exists()
        assert python(attempt(f"open({str(path)!r})")).startswith("FileNotFoundError"), path
    assert python("import os; print(*os.environ.values())").count("s3cret") == 0
    shown = python_tool.python_tool(**SMALL, readable=[str(secret)])
    assert shown(f"print(open({str(secret)!r}).read())") == "s3cret\n"
    assert "Read-only" in shown(attempt(f"open({str(secret)!r}, 'w')"))
    assert secret.read_text() == "s3cret"


@pytest.mark.slow
def test_nothing_outside_is_written(python, tmp_path):
    for path in ("/planted", f"{sys.prefix}/lib/planted", f"{tmp_path}/planted", "/dev/planted"):
        assert "Error" in python(attempt(f"open({path!r}, 'w')")), path
        assert not os.path.exists(path)
    assert "Read-only" in python(attempt(f"import os; os.chmod({sys.prefix + '/lib'!r}, 0)"))


@pytest.mark.slow
def test_nothing_outside_is_reached(python):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(f"\0tool-{os.getpid()}")
        local.listen()
        port = server.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
        assert "Operation not permitted" in python(attempt(code))
        code = f"import socket; socket.socket(socket.AF_UNIX).connect('\\0tool-{os.getpid()}')"
        assert "Operation not permitted" in python(attempt(code))
    assert "ProcessLookupError" in python(attempt(f"import os; os.kill({os.getpid()}, 0)"))
    assert python("import ctypes; print(ctypes.CDLL(None).unshare(0x10000000))") == "-1\n"


FILTER = '    close_calls(request["sockets"])\n'
FREE = "for name, limit in request"
HOLES = [
    ({FILTER: ""}, "system calls"),
    ({FILTER: "", "NEWPID | NEWNET |": "NEWPID |"}, "network"),
    ({"for path in readable:": f"for path in [*readable, {tempfile.gettempdir()!r}]:"}, "reading files"),
    ({"mode=755": "mode=777", "READ_ONLY | NOSUID": "NOSUID"}, "writing files"),
    ({FREE: f'request["limits"].pop("RLIMIT_NPROC")\n    {FREE}'}, "processes"),
    ({FREE: f'request["limits"].pop("RLIMIT_AS")\n    {FREE}'}, "memory_mb"),
    ({FREE: f'request["limits"].pop("RLIMIT_FSIZE")\n    {FREE}', "size={megabytes}m,": ""}, "files_mb"),
    ({'"unshare", NEWNS |': '"unshare", -1 |'}, r"mounts, processes and network: Invalid.*max_user_namespaces"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("hole", "named"), HOLES)
def test_a_limit_that_does_not_hold_is_refused(hole, named, monkeypatch, tmp_path):
    text = python_tool._SANDBOX.read_text()
    for line, broken in hole.items():
        assert line in text
        text = text.replace(line, broken)
    (tmp_path / "sandbox.py").write_text(text)
    monkeypatch.setattr(python_tool, "_SANDBOX", tmp_path / "sandbox.py")
    python_tool._try_limits.cache_clear()
    with pytest.raises(SandboxError, match=named):
        python_tool.python_tool(**SMALL)


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        ({"memory_mb": 0}, "memory_mb = 0"),
        ({"processes": 1.5}, "processes = 1.5"),
        ({"readable": ["nothing"]}, "'nothing': not an existing absolute path"),
    ],
)
def test_limits_that_are_none_are_refused(limits, says):
    with pytest.raises(SandboxError, match=says):
        python_tool.python_tool(**limits)


def test_a_sandbox_that_fails_later_is_no_answer_to_the_policy(monkeypatch):
    """It would be trained on."""

    def run(*_):
        raise EnvironmentFailed("raised", "namespaces: No space left on device")

    monkeypatch.setattr(python_tool, "_try_limits", lambda limits: None)
    monkeypatch.setattr(python_tool, "_run", run)
    host = _Host(Python)
    host._environment = host._make()
    host._stepped = Tools(host._environment.tools)
    with pytest.raises(EnvironmentFailed, match="No space left"):
        host._step('<tool_call>{"name": "python", "arguments": {"code": "1"}}</tool_call>')
