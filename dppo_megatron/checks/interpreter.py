"""Rule of `engine.python`: the interpreter that is to run the servers can."""

from __future__ import annotations

import os
import signal
import subprocess

from dppo_megatron.config import Config

ANSWER_S = 25.0  # it imports nothing, but a slow file system may hold it

MEMORY_SAVER = "torch_memory_saver"  # a package for CUDA; without it SGLang frees nothing when it sleeps


def problems(config: Config, *, elsewhere: bool = False) -> list[str]:
    """Starts the interpreter to look for the engine's packages, without importing them. `elsewhere`: the run has other
    devices than this machine."""
    from dppo_megatron.engines.kinds import server_python

    if not config.started_engines:
        return []
    kind, python = config.engine.kind, str(server_python(config))
    remedy = f"install {kind} there, or set engine.python to the interpreter of an environment that has it"
    if kind == "sglang":
        remedy += "; `make sglang` builds one for the CPU in .venv-sglang"
    try:
        if not _finds(python, kind):
            return [f"engine.kind = {kind}: {python} has no package {kind}; {remedy}"]
        if _gives_memory_back(config, elsewhere) and not _finds(python, MEMORY_SAVER):
            return [
                f"engine.placement = colocated: {python} has no package {MEMORY_SAVER}, by which SGLang gives the "
                f"memory of weights and cache back; install it there (`{python} -m pip install torch-memory-saver`), "
                "set engine.python to the interpreter of an environment that has it, set engine.kind to vllm, or give "
                "the engines GPUs of their own"
            ]
    except OSError as error:
        return [f"engine.python = {python}: cannot be run ({error}); {remedy}"]
    return []


def _gives_memory_back(config: Config, elsewhere: bool) -> bool:
    """Whether SGLang servers of this run are to free GPU memory."""
    from dppo_megatron.engines.serving import device_here

    if config.engine.placement != "colocated" or config.engine.kind != "sglang":
        return False
    return config.slurm.gpus_per_node > 0 if elsewhere else device_here() == "cuda"


def _finds(python: str, package: str) -> bool:
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    null = subprocess.DEVNULL  # what it prints may have no end
    with subprocess.Popen(
        [python, "-c", look], stdin=null, stdout=null, stderr=null, start_new_session=True
    ) as process:
        try:
            return process.wait(ANSWER_S) == 0
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started
            raise OSError(f"no answer in {ANSWER_S:g} s") from None
