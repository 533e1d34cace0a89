"""Resolve the locks of GPU machines: `python tools/gpu_locks.py` rewrites requirements/{gpu,te,sglang-gpu}.lock.

uv asks the package index for the newest versions that setup.py's extras allow. Versions that the CPU lock has are kept
where they are allowed, so a GPU machine serves with the packages that CI tests.
"""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[1]
PYTHON = "3.12"
GLIBC = {"sglang": "2_34"}  # SGLang has no packages for older systems
NO_WHEEL = "transformer-engine-torch"  # the one package that is compiled where it is installed
MEGATRON = "megatron-core==0.19.2"  # the newest in `make test-megatron-next`; the CPU lock's version is for Python 3.11


@dataclass(frozen=True)
class Resolution:
    pins: dict[str, str]  # normalized name to version; empty if the requirements cannot be met
    error: str  # uv's explanation, or ""


def uv() -> str | None:
    """Return the path of uv, in this environment or on the PATH."""
    return shutil.which("uv", path=sysconfig.get_path("scripts")) or shutil.which("uv")


def extras(root: Path = ROOT) -> dict[str, list[str]]:
    """Return the requirements of every extra in setup.py; the key "" has the requirements of every installation."""
    with mock.patch("setuptools.setup") as setup:
        runpy.run_path(str(root / "setup.py"))
    arguments = setup.call_args.kwargs
    return {"": arguments["install_requires"], **arguments["extras_require"]}


def requirements(*names: str) -> list[str]:
    """Return the requirements of `dppo_megatron[names]`."""
    known = extras()
    return [line for name in ("", *names) for line in known[name]]


def read_lock(file: Path) -> dict[str, str]:
    """Return normalized name to version of every `name==version` line."""
    lines = (line.split("#")[0].strip() for line in file.read_text().splitlines())
    pairs = (line.split("==") for line in lines if line)
    return {name.lower().replace("_", "-").replace(".", "-"): version for name, version in pairs}


def resolve(
    wanted: Iterable[str],
    *,
    constraints: Iterable[str] = (),
    preferred: Iterable[str] = (),
    glibc: str = "2_31",
    build: bool = False,
    timeout_s: float = 120,
) -> Resolution:
    """Resolve as pip would for Python 3.12 on Linux x86_64. With `build`, source packages are allowed too."""
    executable = uv()
    if executable is None:
        raise FileNotFoundError("uv is not installed: `make install` installs it, or pip install uv")
    with tempfile.TemporaryDirectory() as folder:
        wish, bound, lock = (Path(folder) / name for name in ("wanted.in", "constraints.txt", "out.lock"))
        wish.write_text("\n".join(wanted))
        bound.write_text("\n".join(constraints))
        lock.write_text("\n".join(preferred))
        command = [executable, "--no-config", "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
        command += ["--python-version", PYTHON, "--python-platform", f"x86_64-manylinux_{glibc}"]
        command += [
            "--python",
            sys.executable,
            "--no-python-downloads",
        ]  # without it, uv first searches a few seconds for Python 3.12
        command += [str(wish), "--constraint", str(bound), "--output-file", str(lock)]
        command += [] if build else ["--no-build"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
        if done.returncode:
            return Resolution({}, done.stderr)
        return Resolution(read_lock(lock), "")


GPU = ("gpu", "vllm", "wandb")  # extras of gpu.lock; the configs for GPUs log to wandb
HEADER = """\
# {what}
# Python 3.12, CUDA 13 (driver 580 or newer), Linux with glibc {glibc}. Resolved by `python tools/gpu_locks.py`, with
# the versions of {like} wherever setup.py allows them. Installed by containers/install.sh, with --no-deps.
"""
WHAT = {
    "gpu": "Trainer and vLLM on GPUs: `dppo_megatron[gpu,vllm,wandb]`, with vLLM, torch, transformers of cpu.lock.",
    "te": "TransformerEngine, added to gpu.lock: `dppo_megatron[te]`. transformer-engine-torch is compiled there.",
    "sglang-gpu": "SGLang's own environment on GPUs: `dppo_megatron[sglang]`. engine.python names its interpreter.",
}


def _pinned(pins: dict[str, str]) -> list[str]:
    return [f"{name}=={version}" for name, version in sorted(pins.items())]


def _write(
    name: str, found: Resolution, *, like: str, glibc: str = "2.31", without: Iterable[str] = ()
) -> dict[str, str]:
    if found.error:
        sys.exit(f"requirements/{name}.lock: {found.error}")
    pins = {package: version for package, version in found.pins.items() if package not in set(without)}
    header = HEADER.format(what=WHAT[name], glibc=glibc, like=like)
    (ROOT / "requirements" / f"{name}.lock").write_text(header + "\n".join(_pinned(pins)) + "\n")
    print(f"requirements/{name}.lock: {len(pins)} packages")
    return pins


def main() -> None:
    def like(name: str) -> list[str]:
        return _pinned(read_lock(ROOT / "requirements" / name))

    wanted = requirements(*GPU)
    gpu = _write("gpu", resolve(wanted, constraints=[MEGATRON], preferred=like("cpu.lock")), like="cpu.lock")
    te = resolve(requirements("te"), constraints=_pinned(gpu), build=True)
    _write("te", te, like="gpu.lock", without=gpu)
    sglang = resolve(extras()["sglang"], preferred=like("sglang-cpu.lock"), glibc=GLIBC["sglang"])
    _write("sglang-gpu", sglang, like="sglang-cpu.lock", glibc="2.34")


if __name__ == "__main__":
    main()
