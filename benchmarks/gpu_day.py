"""Run the checks and measurements that need GPUs, part by part, and write their results to a file.

    make test-gpu                               all parts on this machine's GPUs, one to eight
    python benchmarks/gpu_day.py --device cpu   the same parts on tiny shapes, as a test of the script
    python benchmarks/gpu_day.py --only actor offload --output DIRECTORY

Every part is its own process, with ranks if it needs several devices, and has a time limit, so a part that hangs or
dies does not affect the others. A part that lacks something is skipped with the reason. Without a CUDA device all parts
are skipped, and the exit status is 0. It is 1 if a part failed. The file is
benchmarks/results/DATE-COUNT-x-CHIP-gpu-day.txt. docs/gpu_day.md lists the requirements.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_machine import ROOT, chip, cuda_devices, found, machine, topology
from gpu_values import VARIABLE

BUDGET_S = {1: 720.0, 2: 1800.0}  # limit of all parts: with one device, with more
LEAST_S = 10.0  # least remaining time to start a part
SHOWN = 120  # last lines of a part's output that are kept
PROFILER = "USDT:"  # prefix of the profiler's trace lines
CPU_DEVICES = 3  # processes of a dry run
MOST = 8
TRAINER = ("megatron.core", "pydantic", "safetensors", "yaml", "psutil", "tenacity")
UNCHECKED = "VALUES NOT CHECKED: a run with --no-values. Nothing here is a measurement or a result."


@dataclass(frozen=True)
class Part:
    """One check or measurement.

    command: arguments of the interpreter; {device}, {work} (a directory that all parts share) and {count} are filled
    in. devices: the fewest that it needs. count: processes to start, given the number of devices. values_only: the part
    only compares numbers.
    """

    name: str
    what: str
    limit_s: float
    needs: tuple[str, ...]  # modules
    command: tuple[str, ...]
    on_cpu: tuple[str, ...] | None = None  # command of a dry run, if it differs
    devices: int = 1
    count: Callable[[int], int] = lambda devices: 2
    values_only: bool = False


def _script(name: str, what: str, limit_s: float, *needs: str, script: str = "gpu_parts.py", **more: Any) -> Part:
    command = (f"benchmarks/{script}", name, "--device", "{device}", "--work", "{work}")
    return Part(name, what, limit_s, (*TRAINER, *needs), (*command, *more.pop("arguments", ())), **more)


def _ranks(name: str, what: str, limit_s: float, devices: int = 2, **more: Any) -> Part:
    arguments = ("--ranks", "{count}")
    return _script(name, what, limit_s, script="gpu_ranks.py", devices=devices, arguments=arguments, **more)


def _weights(name: str, what: str, limit_s: float, *needs: str, **more: Any) -> Part:
    arguments = ("--receivers", "{count}")
    return _script(name, what, limit_s, *needs, script="gpu_broadcast.py", arguments=arguments, **more)


def _mesh(devices: int) -> int:
    return 8 if devices >= 8 else 4


def _rest(devices: int) -> int:
    return devices - 1


PARTS = (
    Part(
        "correctness",
        "token statistics and grouped experts on the GPU against float64 (tests/gpu)",
        240,
        ("pytest", "hypothesis"),
        ("-m", "pytest", "tests/gpu", "-q", "-rs", "-p", "no:cacheprovider"),
        values_only=True,
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
    _script("actor", "updates in bf16, each kind of layers and FP8; no wait for the device in the loss", 150),
    _script("moe", "the same with 8 experts", 100),
    _script(
        "time_by_kernel",
        "kernels of an update, and how long the device waits for the host",
        100,
        script="gpu_profile.py",
    ),
    _script("checkpoint", "save and load: the same bits; the time of both, and of an export", 80),
    _script("offload", "optimizer.offload: the same bits, the time and the memory", 80),
    _script("grpo", "a step of GRPO and of top-K DPPO on the shape of Qwen3-0.6B", 100),
    _script("colocated", "a run whose vLLM engine shares the trainer's GPU", 180, "vllm", "transformers"),
    _script("sdpa", "the backends of attention: which one ran, time and values", 90, script="gpu_profile.py"),
    _ranks("tp2", "tensor and sequence parallel on 2: as one process, and no wait in the loss", 150),
    _ranks("cp2", "context parallel on 2: the same", 150),
    _ranks("ep2", "expert parallel on 2: the same", 150),
    _ranks("dp2", "data parallel on 2 with a distributed optimizer and overlap: the same, and the time", 150),
    _ranks("pp2", "pipeline parallel on 2: the same", 150),
    _ranks("mesh", "tensor x context x data, tensor x expert on 4 or 8: the same", 240, 4, count=_mesh),
    _weights(
        "broadcast", "weights to plain receivers: GB/s, values, one killed in a bucket", 120, devices=2, count=_rest
    ),
    _weights("vllm_tp2", "weights to a vLLM server of 2 GPUs", 420, "vllm", "transformers", "tokenizers", devices=3),
)


@dataclass(frozen=True)
class Outcome:
    part: Part
    result: str  # "ok", "failed: ...", "skipped: ..."
    seconds: float
    output: str


def lacking(part: Part, device: str | None, devices: int, values: bool) -> str | None:
    """Return the reason why the part cannot run here, or None."""
    if not found("torch"):
        return f"torch is not installed in {sys.executable}"
    if device is None:
        return "no CUDA device on this machine"
    if devices < part.devices:
        return f"it needs {part.devices} devices, and here {'is' if devices == 1 else 'are'} {devices}"
    if part.values_only and not values:
        return "it only compares values"
    apart = Path(sys.prefix) / "triton-interpreter"  # where `make install` puts Triton on a machine without a GPU
    missing = [
        name for name in part.needs if not found(name) and not (name == "triton" and (apart / "triton").exists())
    ]
    return f"{', '.join(missing)} not installed" if missing else None


def run(part: Part, device: str, devices: int, values: bool, work: str, limit_s: float) -> Outcome:
    template = part.on_cpu if device == "cpu" and part.on_cpu else part.command
    command = [sys.executable, *(word.format(device=device, work=work, count=part.count(devices)) for word in template)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    if not values:
        environment[VARIABLE] = "1"
    log = Path(work) / f"{part.name}.log"
    started = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
            result = ("ok" if values else "ran") if code == 0 else f"failed: exit status {code}"
        except subprocess.TimeoutExpired:
            result = f"failed: not done within {limit_s:.0f} s"
        finally:
            _end_session(process)
    lines = [line for line in log.read_text(errors="replace").splitlines() if not line.startswith(PROFILER)]
    return Outcome(part, result, time.monotonic() - started, "\n".join(lines[-SHOWN:]))


def _end_session(process: subprocess.Popen) -> None:
    """End the part and its child processes, which share a session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(5)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def table(outcomes: list[Outcome]) -> list[str]:
    return [f"{o.part.name:<12}{o.seconds:>7.1f} s  {o.result:<40}  {o.part.what}" for o in outcomes]


def report(head: list[str], outcomes: list[Outcome]) -> str:
    lines = ["benchmarks/gpu_day.py", *head, *topology(), "", *table(outcomes)]
    for outcome in outcomes:
        if outcome.output:
            lines += ["", f"== {outcome.part.name}: {outcome.part.what}", outcome.output]
    return "\n".join(lines) + "\n"


def result_file(directory: Path, chip: str, values: bool) -> Path:
    name = "".join(c if c.isalnum() else "-" for c in chip.lower()).strip("-")
    return directory / f"{datetime.date.today()}-{name}-{'gpu-day' if values else 'values-not-checked'}.txt"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="cpu: a dry run")
    parser.add_argument(
        "--devices", type=int, help=f"number of devices to use; default: all up to {MOST}, or {CPU_DEVICES} on a CPU"
    )
    parser.add_argument(
        "--budget-s",
        type=float,
        help=f"limit of all parts together; default: {BUDGET_S[1]:g}, with several devices {BUDGET_S[2]:g}",
    )
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], metavar="PART")
    parser.add_argument("--no-values", action="store_true", help="compare no numbers, for devices that compute nothing")
    parser.add_argument("--output", type=Path, help="directory (benchmarks/results; none for a dry run or --no-values)")
    arguments = parser.parse_args()
    cuda = cuda_devices()
    if arguments.device == "cuda" and not cuda:
        parser.error("--device cuda: no CUDA device on this machine")
    device = "cpu" if arguments.device == "cpu" else "cuda" if cuda else None
    devices, values = CPU_DEVICES if device == "cpu" else min(cuda, MOST), not arguments.no_values
    if arguments.devices:
        devices = arguments.devices if device == "cpu" else min(devices, arguments.devices)
    budget_s = BUDGET_S[1 if devices < 2 else 2] if arguments.budget_s is None else arguments.budget_s
    head = [*([] if values else [UNCHECKED]), *machine(device, devices)]
    print("\n".join(head), flush=True)
    outcomes: list[Outcome] = []
    ends = time.monotonic() + budget_s
    with tempfile.TemporaryDirectory() as work:
        for part in PARTS:
            if arguments.only and part.name not in arguments.only:
                continue
            left = ends - time.monotonic()
            reason = lacking(part, device, devices, values)
            if reason is None and left < LEAST_S:
                reason = f"{budget_s:.0f} s are over"
            if reason is None:
                limit_s = part.limit_s * (2 if device == "cpu" else 1)  # other programs may use the cores
                outcomes.append(run(part, device, devices, values, work, min(limit_s, left)))
                print(f"\n{outcomes[-1].output}")
            else:
                outcomes.append(Outcome(part, f"skipped: {reason}", 0.0, ""))
            print(*table(outcomes[-1:]), flush=True)
    print("\n" + "\n".join(table(outcomes)))
    directory = arguments.output or (ROOT / "benchmarks" / "results" if device == "cuda" and values else None)
    if directory is not None and device is not None:
        directory.mkdir(parents=True, exist_ok=True)
        path = result_file(directory, chip(device, devices), values)
        path.write_text(report(head, outcomes))
        print(f"written: {path}")
    if not values:
        print(UNCHECKED)
    return int(any(outcome.result.startswith("failed") for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
