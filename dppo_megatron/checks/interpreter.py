"""Rule of `engine.python`: the interpreter that is to run the servers can."""

from __future__ import annotations

import subprocess

from dppo_megatron.config import Config


def problems(config: Config) -> list[str]:
    """Starts the interpreter to look for the engine's package, without importing it."""
    from dppo_megatron.engines.kinds import server_python

    if not config.started_engines:
        return []
    kind, python = config.engine.kind, server_python(config)
    remedy = f"install {kind} there, or set engine.python to the interpreter of an environment that has it"
    if kind == "sglang":
        remedy += "; `make sglang` builds one for the CPU in .venv-sglang"
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({kind!r}) is None)"
    try:
        found = subprocess.run([python, "-c", look], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"engine.python = {python}: cannot be run ({error}); {remedy}"]
    return [] if found else [f"engine.kind = {kind}: {python} has no package {kind}; {remedy}"]
