"""Builds the null device: libraries of CUDA in which every call succeeds and no kernel is run.

    python -m tests.null_gpu.device DIRECTORY COMMAND...        runs the command where torch finds the device

`runtime.c` holds the functions that must do more than succeed. All others are made from the names that torch and vLLM
leave undefined, so that none of NVIDIA's packages is needed. Needs gcc, nm, readelf and the headers in Triton's
package.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent
NVIDIA = re.compile(r"lib(cu[\w]*|nv[\w]*|nccl)\.so\.\d+$")
DRIVER, RUNTIME, MANAGEMENT = "libcuda.so.1", "libcudart.so.13", "libnvidia-ml.so.1"
# The library of an undefined name without a version, by its prefix.
OWNERS = (
    ("cublasLt", "libcublasLt.so.13"),
    ("cublas", "libcublas.so.13"),
    ("cudnn", "libcudnn.so.9"),
    ("cuFile", "libcufile.so.0"),
    ("cusparseLt", "libcusparseLt.so.0"),
    ("nccl", "libnccl.so.2"),
)
# Data or text in the place of functions that return a status.
SUCCESS = "long {name}(void) {{ return 0; }}"
JUMP = 'asm(".globl {name}\\n.type {name}, @function\\n{name}: jmp null_{name}@PLT");'
VARIABLE = "NULL_GPU"  # set where the device is
TOOLS = ("gcc", "nm", "readelf")


class Unavailable(RuntimeError):
    """This machine or environment cannot build the device; the text names the missing part."""


def environment(directory: Path) -> dict[str, str]:
    """Variables with which a process of this Python finds the device. Builds its libraries into `directory` first."""
    libraries = build(directory)
    return {
        VARIABLE: str(libraries[0].parent),
        "LD_PRELOAD": ":".join(map(str, libraries)),
        "LD_LIBRARY_PATH": os.pathsep.join(
            [str(libraries[0].parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        ),
        "TRITON_LIBCUDA_PATH": str(libraries[0].parent),
        "TRITON_CACHE_DIR": str(directory / "triton"),
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # ranks are forked from a process that has imported torch
    }


def here() -> bool:
    """Whether this process has the device."""
    return VARIABLE in os.environ


def build(directory: Path) -> list[Path]:
    """Return the libraries, and build them again if the packages or this folder have changed."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise Unavailable(f"{', '.join(missing)} not found")
    packages = Path(_package("torch")).parent
    sources = [HERE / "runtime.c", HERE / "device.py"]
    versions = [importlib.metadata.version(name) for name in ("torch", "triton", "vllm")]
    state = hashlib.sha256("".join([*versions, *(p.read_text() for p in sources)]).encode()).hexdigest()[:12]
    out = directory / f"libraries-{state}"
    if not out.exists():
        partial = directory / f"partial-{os.getpid()}"
        partial.mkdir(parents=True)
        _compile_all(packages, partial)
        partial.rename(out)
    # torch names the libraries by their own paths first, and does not look for one that is loaded.
    return sorted(out.glob("*.so.*"), key=lambda p: p.name != RUNTIME)


def _package(name: str) -> str:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise Unavailable(f"{name} is not installed in {sys.executable}")
    return str(Path(spec.origin).parent)


def _compile_all(packages: Path, out: Path) -> None:
    headers = packages / "triton/backends/nvidia/include"
    if not (headers / "driver_types.h").exists():
        raise RuntimeError(f"no CUDA headers in {headers}")
    if not (packages / "torch/lib/libtorch_cuda.so").exists():
        raise RuntimeError(f"torch in {packages} is built without CUDA: install the build of the Python package index")
    runtime = (HERE / "runtime.c").read_text()
    own = set(re.findall(r"^(?:int|long|size_t|const char \*)\s?\*?(\w+)\(", runtime, re.M))
    versions: dict[str, str] = {}  # library -> the version node that its users ask for
    names: dict[str, set[str]] = defaultdict(set)
    for user in [*packages.glob("torch/lib/lib*.so"), *packages.glob("vllm/**/*.so")]:
        for line in _output("readelf", "-d", user).splitlines():
            found = re.search(r"NEEDED.*\[(.*)\]", line)
            if found and NVIDIA.match(found[1]):
                names[found[1]] |= set()
        for name, version in re.findall(
            r" [Uw] (\w+)(?:@(\S+))?$", _output("nm", "-D", "--undefined-only", user), re.M
        ):
            library = _owner(name, version)
            if library:
                names[library].add(name)
                if version:
                    versions[library] = version
    names[DRIVER] |= _driver_names((headers / "cuda.h").read_text(errors="replace"))
    names[MANAGEMENT] = {"nvmlInit", "nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlShutdown"}
    # All of runtime.c is in the runtime; the others jump there, each under a name with its own version.
    elsewhere = {name for library in names if library != RUNTIME for name in names[library]} & own
    written = out / "sources"
    written.mkdir()
    renamed = [f"-D{name}=null_{name}" for name in sorted(elsewhere)]
    for library in sorted(names, key=lambda name: name != RUNTIME):
        text = [SUCCESS.format(name=name) for name in sorted(names[library] - own)]
        text += [JUMP.format(name=name) for name in sorted(names[library] & elsewhere)]
        source, script = written / f"{library}.c", written / f"{library}.map"
        first = library == RUNTIME
        source.write_text((runtime if first else "") + "\n".join(text) + "\n")
        script.write_text(f"{versions.get(library, library).replace('-', '_')} {{ global: *; }};\n")
        with_it = renamed if first else [f"-L{out}", f"-l:{RUNTIME}"]
        _output(
            "gcc", "-O1", "-w", "-fno-builtin", "-shared", "-fPIC", f"-I{headers}", f"-Wl,-soname,{library}",
            f"-Wl,--version-script={script}", "-o", out / library, source, *with_it, "-lpthread",
        )  # fmt: skip


def _owner(name: str, version: str) -> str | None:
    """The library of an undefined name; None for names that are not NVIDIA's."""
    if NVIDIA.match(version):
        return version
    if version == "NVSHMEM" or name.startswith("nvshmem"):
        return "libnvshmem_host.so.3"
    for start, library in OWNERS:
        if name.startswith(start):
            return library
    return DRIVER if re.match(r"cu[A-Z]", name) and not version else None


def _driver_names(header: str) -> set[str]:
    names = set(re.findall(r"\b(cu[A-Z]\w+)\s*\(", header)) | set(re.findall(r"\b(cu[A-Z]\w+_v\d+)\b", header))
    return names | {f"{name}{end}" for name in names if "_pt" not in name for end in ("_ptsz", "_ptds")}


def _output(*command: str | Path) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr[-2000:]}")
    return done.stdout


def main() -> int:
    directory, *command = sys.argv[1:]
    try:
        found = environment(Path(directory).resolve())
    except Unavailable as error:
        print(f"no null device: {error}; skipped")
        return 0
    os.execvpe(command[0], command, {**os.environ, **found})


if __name__ == "__main__":
    sys.exit(main())
