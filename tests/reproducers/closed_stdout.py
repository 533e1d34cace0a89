"""A reader of stdout that goes away (head, a closed terminal) must not cost the report, nor change the exit code.

Run from a clone's root: PYTHONPATH=. python tests/reproducers/closed_stdout.py
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory, "run")
        shutil.copytree(
            Path(__file__).parents[1] / "data" / "run_before" / "run",
            run,
            ignore=shutil.ignore_patterns("report", "checkpoints", "weights"),
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "dppo_megatron", "report", run],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        process.stdout.readline()
        process.stdout.close()
        error = process.stderr.read().strip()[-200:]
        code, written = process.wait(), (run / "report/report.md").exists()
        bad = code != 0 or not written
        print(f"{'WRONG' if bad else 'right'}: exit {code}, report.md written: {written}, stderr: {error!r}")
        sys.exit(bad)
