"""Apply one-line changes to the package, one at a time, and check that the test of each then fails.

    python -m tests.mutants          # every row of mutants.txt, a few minutes
    python -m tests.mutants 3 17     # these rows

Tests run in a copy of this checkout, where all must pass before the first change. Each runs in a fork of this process.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import transformers  # noqa: F401 with torch, for the forks

import dppo_megatron.train.actor  # noqa: F401 with Megatron-core

ROOT = Path(__file__).resolve().parents[1]


def read() -> list[tuple[Path, str, str, str]]:
    """Return file, old and new text and test of each row."""
    lines = [line for line in (ROOT / "tests/mutants.txt").read_text().splitlines() if line and line[0] != "#"]
    rows = zip(lines[::4], lines[1::4], lines[2::4], lines[3::4], strict=True)
    return [(Path("dppo_megatron", file), old[2:], new[2:], test) for file, old, new, test in rows]


def run(tree: Path, log: Path, *tests: str) -> bool:
    """Return whether the tests pass. Raises if anything other than a test fails."""
    if not (pid := os.fork()):
        code = pytest.ExitCode.INTERNAL_ERROR
        try:
            for name in [name for name in sys.modules if name.partition(".")[0] in ("dppo_megatron", "tests")]:
                del sys.modules[name]  # imported again, from the copy
            os.chdir(tree)
            os.environ["PYTHONPATH"] = sys.path[0] = str(tree)
            for stream in (1, 2):
                os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
            code = pytest.main(["-x", "-q", "-m", "", "-p", "no:cacheprovider", *tests])
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), log.read_text()[-3000:]
    return code == pytest.ExitCode.OK


def main(chosen: list[int]) -> bool:
    """Return whether a change survived."""
    rows = {number: row for number, row in enumerate(read(), 1) if number in chosen or not chosen}
    with tempfile.TemporaryDirectory() as directory:
        tree, log, survived = Path(directory, "tree"), Path(directory, "log"), 0
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*"))
        assert run(tree, log, *{row[-1]: None for row in rows.values()}), log.read_text()[-3000:]
        for number, (file, old, new, test) in rows.items():
            before, after = (tree / file).read_text().split(old)  # it stands there once
            (tree / file).write_text(before + new + after)
            os.utime(tree / file, (number, number))  # else a compiled file of the same second and size is taken
            survives = run(tree, log, test)
            shutil.copy2(ROOT / file, tree / file)
            survived += survives
            print(f"{number:3} {'SURVIVED' if survives else 'died':8} {file}: {old}", flush=True)
    print(f"{len(rows) - survived} of {len(rows)} changes died")
    return survived > 0


if __name__ == "__main__":
    sys.exit(main(list(map(int, sys.argv[1:]))))
