"""Import modules by their names from before the groups: `dppo_megatron.rewards` is `dppo_megatron.rollout.rewards`.

Stored configs and users' code name modules. Both names lead to one module object.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

GROUPS = {
    "report": ("doctor",),
    "rollout": ("rewards", "environments", "gateway", "engines", "fleet", "orchestrator"),
    "train": ("actor", "trainer", "weight_sync"),
    "run": ("checks", "plan", "launch", "preflight", "slurm"),
    "lab": ("view", "study", "certify"),
}
_MOVED = {room: f"{group}.{room}" for group, rooms in GROUPS.items() for room in rooms} | {"observability": "report"}


class _Aliases(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, inner = name.partition(".")
        room, dot, rest = inner.partition(".")
        if package != __package__ or room not in _MOVED:
            return None
        moved = find_spec(f"{package}.{_MOVED[room]}{dot}{rest}")
        return moved and ModuleSpec(name, self, loader_state=moved)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return import_module(spec.loader_state.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:  # importlib has just set the alias's
            module.__spec__ = module.__spec__.loader_state


sys.meta_path.insert(0, _Aliases())  # before the finder that would load a file of an aliased package a second time
