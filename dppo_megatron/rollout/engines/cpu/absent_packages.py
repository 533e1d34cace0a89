"""Replace packages that a server imports, but that have no build for a machine without CUDA, with stubs.

Any attribute can be imported from a stub. Attributes raise when called, so a completed run called none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Absent:
    """Replaces an attribute of an absent package. Attributes of a stub are stubs; a call raises NotImplementedError."""

    def __init__(self, name: str):
        self.__name__ = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Absent(f"{self.__name__}.{attribute}")

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError(f"{self.__name__}: not available in the engine's CPU environment")


class AbsentModule(ModuleType):
    __version__ = "0.0.0+absent"
    __getattr__ = Absent.__getattr__


class AbsentPackages(MetaPathFinder, Loader):
    """Finds `packages` and their modules as stubs. The function given for a package, if any, fills the stub."""

    def __init__(self, packages: Mapping[str, Callable[[Any], None] | None]):
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] in self._packages:
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if fill := self._packages.get(module.__name__):
            fill(module)
