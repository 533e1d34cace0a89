"""Check an environment of containers/install.sh with its interpreter: `PYTHON containers/verify.py PACKAGE...`.

Prints versions. Exits with 1 and one line if torch is not the build for CUDA 13, or a package cannot be imported.
vLLM's kernels need NVIDIA's driver (libcuda.so.1) and are skipped without it, as in an image build.
"""

import ctypes
import importlib
import importlib.util
import sys
import warnings
from pathlib import Path

CUDA = "13."
WITH_DRIVER = {"vllm": ["vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm.cumem_allocator"]}  # kernels


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def problem(packages: list[str]) -> str | None:
    """Return the first reason why `packages` cannot be used here."""
    import torch

    print("torch", torch.__version__)
    if not (torch.version.cuda or "").startswith(CUDA):
        return (
            f"torch {torch.__version__} is not the build for CUDA 13, because pip's index, find-links or cache has "
            "another one; remove the environment, unset PIP_FIND_LINKS and install again with PIP_CONFIG_FILE=/dev/null"
        )
    engine = importlib.util.find_spec("transformer_engine")
    if engine and not any(Path(engine.origin).parent.rglob("transformer_engine_torch*.so")):
        return (
            "TransformerEngine has no library for torch; install again with --with-te, or uninstall transformer-engine"
        )
    driver = has_driver()
    kernels = [part for package in packages for part in WITH_DRIVER.get(package, [])] if driver else []
    for name in [*packages, *kernels]:
        try:
            module = importlib.import_module(name)
        except Exception as error:
            return f"import {name}: {type(error).__name__}: {error}"
        print(name, getattr(module, "__version__", ""))
    if driver:
        print("GPUs:", torch.cuda.device_count())
    return None


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    found = problem(sys.argv[1:])
    sys.exit(f"ERROR: {found}" if found else 0)
