"""For the day a GPU is at hand: runs what no GPU has run yet, part by part, and writes what came out to a file.

    make test-gpu                               all parts on this machine's first GPU, eight minutes at most
    python benchmarks/gpu_day.py --device cpu   the same parts on tiny shapes: does the script itself still work?
    python benchmarks/gpu_day.py --only actor offload --output somewhere

Every part is a process of its own with a limit of time, so one that hangs or dies costs no other. A part that lacks
something says what and is skipped; so is everything where there is no CUDA device, and the exit status is 0. It is 1
when a part failed. The file is benchmarks/results/DATE-CHIP.txt. docs/gpu_day.md says what to bring along.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGET_S = 480.0
LEAST_S = 10.0  # less is not worth a start
SHOWN = 60  # last lines of a part's output that are kept
TRAINER = ("megatron.core", "pydantic", "safetensors", "yaml", "psutil")
PACKAGES = ("torch", "triton", "megatron-core", "transformer-engine", "vllm", "numpy")


@dataclass(frozen=True)
class Part:
    """command: after the interpreter; {device} and {work} (a directory that all parts share) are filled in."""

    name: str
    what: str
    limit_s: float
    needs: tuple[str, ...]  # modules
    command: tuple[str, ...]
    on_cpu: tuple[str, ...] | None = None  # instead, for a dry run


def _of_actor(name: str, what: str, limit_s: float, *needs: str) -> Part:
    command = ("benchmarks/gpu_parts.py", name, "--device", "{device}", "--work", "{work}")
    return Part(name, what, limit_s, (*TRAINER, *needs), command)


PARTS = (
    Part(
        "correctness",
        "token statistics on the GPU against float64 (tests/gpu)",
        120,
        ("pytest", "hypothesis"),
        ("-m", "pytest", "tests/gpu", "-q", "-x", "-rs", "-p", "no:cacheprovider"),
    ),
    Part(
        "statistics",
        "token statistics against the bandwidth of a copy",
        60,
        (),
        ("benchmarks/token_statistics.py", "--device", "cuda"),
        (
            "benchmarks/token_statistics.py",
            "--tokens",
            "64",
            "--vocab",
            "512",
            "--dtype",
            "bf16",
            "--tp",
            "1",
            "--repeats",
            "1",
        ),
    ),
    Part(
        "kernels",
        "instructions, spills and rooflines by the Triton that is installed",
        60,
        ("triton",),
        ("benchmarks/kernels.py", "--dtypes", "bf16"),
    ),
    _of_actor("actor", "updates in bf16, each kind of layers; no wait for the device in the loss", 100),
    _of_actor("offload", "optimizer.offload: the same bits, the time and the memory", 80),
    _of_actor("grpo", "a step of GRPO and of top-K DPPO on the shape of Qwen3-0.6B", 100),
    _of_actor("colocated", "a run whose vLLM engine shares the trainer's GPU", 180, "vllm", "transformers"),
)


@dataclass(frozen=True)
class Outcome:
    part: Part
    result: str  # "ok", "failed: ...", "skipped: ..."
    seconds: float
    output: str


def lacking(part: Part, device: str | None) -> str | None:
    """Why the part cannot run here; None where it can."""
    if not _found("torch"):
        return f"torch is not installed in {sys.executable}"
    if device is None:
        return "no CUDA device on this machine"
    apart = Path(sys.prefix) / "triton-interpreter"  # where `make install` puts Triton on a machine without a GPU
    missing = [
        name for name in part.needs if not _found(name) and not (name == "triton" and (apart / "triton").exists())
    ]
    return f"{', '.join(missing)} not installed" if missing else None


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it would be in
        return False


def run(part: Part, device: str, work: str, limit_s: float) -> Outcome:
    template = part.on_cpu if device == "cpu" and part.on_cpu else part.command
    command = [sys.executable, *(word.format(device=device, work=work) for word in template)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    log = Path(work) / f"{part.name}.log"
    started = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
            result = "ok" if code == 0 else f"failed: exit status {code}"
        except subprocess.TimeoutExpired:
            result = f"failed: not done within {limit_s:.0f} s"
        finally:
            _end_session(process)
    lines = log.read_text(errors="replace").splitlines()
    return Outcome(part, result, time.monotonic() - started, "\n".join(lines[-SHOWN:]))


def _end_session(process: subprocess.Popen) -> None:
    """The part and what it started: it has a session of its own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(5)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def machine(device: str | None) -> list[str]:
    """Date, chip and versions."""
    chip, cuda = platform.processor() or platform.machine(), "absent"
    if _found("torch"):
        import torch

        cuda = torch.version.cuda
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        chip = (
            f"{properties.name}, {properties.multi_processor_count} multiprocessors, "
            f"{properties.total_memory / 2**30:.1f} GiB, compute capability {properties.major}.{properties.minor}"
        )
    versions = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} absent")
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"
    except FileNotFoundError:
        commit = "unknown"
    return [
        f"date: {datetime.date.today()}",
        f"chip: {chip}",
        f"versions: Python {platform.python_version()}, CUDA {cuda}, {', '.join(versions)}",
        f"commit: {commit}",
    ]


def table(outcomes: list[Outcome]) -> list[str]:
    return [f"{o.part.name:<12}{o.seconds:>7.1f} s  {o.result:<40}  {o.part.what}" for o in outcomes]


def report(head: list[str], outcomes: list[Outcome]) -> str:
    lines = ["benchmarks/gpu_day.py", *head, "", *table(outcomes)]
    for outcome in outcomes:
        if outcome.output:
            lines += ["", f"== {outcome.part.name}: {outcome.part.what}", outcome.output]
    return "\n".join(lines) + "\n"


def result_file(directory: Path, chip: str) -> Path:
    name = "".join(c if c.isalnum() else "-" for c in chip.lower()).strip("-")
    return directory / f"{datetime.date.today()}-{name}-gpu-day.txt"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="cpu: a dry run")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="of all parts together")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], metavar="PART")
    parser.add_argument("--output", type=Path, help="directory (benchmarks/results; none for a dry run)")
    arguments = parser.parse_args()
    cuda = False
    if _found("torch"):
        import torch

        cuda = torch.cuda.is_available()
    if arguments.device == "cuda" and not cuda:
        parser.error("--device cuda: no CUDA device on this machine")
    device = "cpu" if arguments.device == "cpu" else "cuda" if cuda else None
    head = machine(device)
    print("\n".join(head), flush=True)
    outcomes: list[Outcome] = []
    ends = time.monotonic() + arguments.budget_s
    with tempfile.TemporaryDirectory() as work:
        for part in PARTS:
            if arguments.only and part.name not in arguments.only:
                continue
            left = ends - time.monotonic()
            reason = lacking(part, device)
            if reason is None and left < LEAST_S:
                reason = f"{arguments.budget_s:.0f} s are over"
            if reason is None:
                limit_s = part.limit_s * (2 if device == "cpu" else 1)  # which others may keep busy
                outcomes.append(run(part, device, work, min(limit_s, left)))
                print(f"\n{outcomes[-1].output}")
            else:
                outcomes.append(Outcome(part, f"skipped: {reason}", 0.0, ""))
            print(*table(outcomes[-1:]), flush=True)
    print("\n" + "\n".join(table(outcomes)))
    directory = arguments.output or (ROOT / "benchmarks" / "results" if device == "cuda" else None)
    if directory is not None and device is not None:
        directory.mkdir(parents=True, exist_ok=True)
        chip = torch.cuda.get_device_name() if device == "cuda" else "cpu-dry-run"
        path = result_file(directory, chip)
        path.write_text(report(head, outcomes))
        print(f"written: {path}")
    return int(any(outcome.result.startswith("failed") for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
