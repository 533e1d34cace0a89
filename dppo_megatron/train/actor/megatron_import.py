"""Imports Megatron-core, which depends on the modules imported before it."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from functools import cache
from typing import Any

import torch

_ENGINE = "transformer_engine"
_modules: dict[str, Any] = sys.modules  # importing a module that is None here raises ModuleNotFoundError


def import_megatron() -> None:
    """Import Megatron-core; call this before any other import of Megatron-core."""
    # Megatron-core warns at import about packages that are not installed (Actor.describe lists the substitutes), and
    # calls torch by names that a newer torch renames. Neither belongs in a run's log.
    warnings.filterwarnings("ignore", module=r"megatron\.core\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
    # Megatron-core imports wandb for an inference server that is not used here: a quarter of the import time.
    if hides_wandb := "wandb" not in sys.modules:
        _modules["wandb"] = None
    try:
        load_problem()
        _disable_compiled_fusions()
        import megatron.core  # noqa: F401
    finally:
        if hides_wandb:
            del sys.modules["wandb"]


@cache
def load_problem() -> str:
    """Import TransformerEngine. Return the import error if TransformerEngine is installed but does not load, else "".

    Megatron-core catches only ImportError, but TransformerEngine raises FileNotFoundError without its torch library
    and OSError without CUDA's. After any error each later import raises ModuleNotFoundError, so that local layers work.
    """
    if importlib.util.find_spec(_ENGINE) is None:
        return ""
    try:
        importlib.import_module(f"{_ENGINE}.pytorch")
    except Exception as error:
        for name in [name for name in sys.modules if name.partition(".")[0] == _ENGINE]:
            del sys.modules[name]
        _modules[_ENGINE] = None
        return f"{type(error).__name__}: {error}"
    return ""


def _disable_compiled_fusions() -> None:
    """Turn Megatron-core's jit_fuser off if CUDA is absent.

    The fuser applies torch.compile as a decorator while modules are imported. That costs minutes of g++ for functions
    that take microseconds on a CPU.
    """
    if torch.cuda.is_available():
        return
    compile_, torch.compile = torch.compile, _skip_compile  # type: ignore[assignment]
    try:
        from megatron.core import jit
    finally:
        torch.compile = compile_
    jit.disable_jit_fuser()


def _skip_compile(function: Any = None, **_: Any) -> Any:
    return function or _skip_compile
