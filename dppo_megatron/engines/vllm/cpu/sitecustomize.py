"""Let vLLM import its Qwen3.5 on a machine without CUDA: the published torchvision is for the CUDA torch.

Python reads this file at start because the server's PYTHONPATH names this directory (see `engines/vllm/kind.py`).
torchvision becomes a stub. Any attribute can be imported from it and raises when called; text needs none of them.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class StubAttribute:
    """Replaces any attribute of torchvision. Its attributes are stubs too, and a call raises."""

    def __init__(self, name: str):
        self.__name__ = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return StubAttribute(f"{self.__name__}.{attribute}")

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError(f"{self.__name__}: not available in vLLM's CPU environment")


class StubModule(ModuleType):
    __version__ = "0.0.0+absent"
    __getattr__ = StubAttribute.__getattr__


class StubFinder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty."""


sys.meta_path.append(StubFinder())  # behind the installed packages
