"""The small environment of docs/slurm.md, in which the driver of a job of containers runs, suffices for it."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROGRAM = """
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys({absent}))
import dppo_megatron.run.slurm
for module in pkgutil.iter_modules(dppo_megatron.run.slurm.__path__):
    importlib.import_module("dppo_megatron.run.slurm." + module.name)
from dppo_megatron.cli import main
config = "examples/qwen3_8b/config.yaml"
sys.argv = ["dppo-megatron", "slurm", config, "--dry-run", "--set", "slurm.command=[dppo-megatron]"]
main()
"""


def with_their_needs(names: list[str]) -> set[str]:
    """Return the packages and, recursively, what they require."""
    found, left = set(), list(names)
    while left:
        name = canonicalize_name(left.pop())
        if name not in found:
            found.add(name)
            needs = map(Requirement, importlib.metadata.requires(name) or [])
            left += [need.name for need in needs if not need.marker or need.marker.evaluate({"extra": ""})]
    return found


def test_it_suffices_for_the_driver():
    text = " ".join((ROOT / "docs" / "slurm.md").read_text().split())
    (listed,) = re.findall(r"`pip install -e \. ([a-z0-9 ]+)`", text)
    there = with_their_needs(["torch", *listed.split()])  # the package itself requires torch
    modules = importlib.metadata.packages_distributions()
    absent = [
        m
        for m, owners in modules.items()
        if not there & {canonicalize_name(o) for o in owners} and m != "dppo_megatron"
    ]
    absent = [m for m in absent if m.split(".")[0] not in sys.stdlib_module_names]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(absent=absent)], cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "#SBATCH --nodes=2" in done.stdout
    assert re.search(rf"slurm-job {ROOT}/\S+/config.yaml\n$", done.stdout), "a container has another working directory"


def test_a_missing_package_is_named_with_the_command_that_installs_it():
    code = "import sys; sys.modules['typer'] = None; from dppo_megatron.__main__ import main; main()"
    refused = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert refused.returncode == 1
    assert refused.stderr == "no package typer: pip install '.[cpu]' in the repository, or '.[gpu]', installs it\n"
