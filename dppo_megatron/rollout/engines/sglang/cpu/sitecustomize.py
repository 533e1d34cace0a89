"""Let SGLang run on a machine without CUDA, where the native packages have no build.

Python reads this file at start because the server's PYTHONPATH names this directory (see `../kind.py`).

- `sgl_kernel` (no published CPU build) and `torchvision` (the published build is for the CUDA torch) become stubs
  (`absent_packages`). The run needs a single native function, the hash for seeded sampling. `seeded_sampling`
  implements it.
- Seeded sampling needs `--enable-deterministic-inference`, which supports only GPU attention and replaces GPU kernels.
  Here this option accepts torch attention on the CPU, one request at a time, and replaces no kernels.
- Returning routed experts pins a host buffer through CUDA even on a machine without CUDA. Adapters (LoRA, by SGLang's
  backend in plain torch) pin their batch tables. The pinning is skipped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from absent_packages import AbsentPackages


def register_native_functions(module: Any) -> None:
    import seeded_sampling

    module.library = seeded_sampling.register()


def admit_torch_attention(module: Any) -> None:
    module.add_deterministic_attention_backend_choices(["torch_native"])


def replace_no_kernels(module: Any) -> None:
    module.enable_batch_invariant_mode = lambda *_args, **_kwargs: None


def skip_pinning(module: Any) -> None:
    module._cuda_host_register = lambda *_args, **_kwargs: None


class TorchWithoutPinning:
    """Replaces torch, and ignores `pin_memory` in `torch.tensor` and `torch.zeros`."""

    def __getattr__(self, name: str) -> Any:
        import torch

        attribute = getattr(torch, name)
        return partial(_unpinned, attribute) if name in ("tensor", "zeros") else attribute


def _unpinned(factory: Callable[..., Any], *arguments: Any, pin_memory: bool = False, **options: Any) -> Any:
    return factory(*arguments, **options)


def skip_pinning_of_adapters(module: Any) -> None:
    module.torch = TorchWithoutPinning()
    from torch import Tensor

    tensor: Any = Tensor
    tensor.pin_memory = lambda tensor, *_args: tensor


ADJUSTED = {
    "sglang.srt.arg_groups.choices": admit_torch_attention,
    "sglang.srt.batch_invariant_ops": replace_no_kernels,
    "sglang.srt.lora.backend.torch_backend": skip_pinning_of_adapters,
    "sglang.srt.lora.layers": skip_pinning_of_adapters,
    "sglang.srt.mem_cache.pool_host.common": skip_pinning,
}


class AdjustedModules(MetaPathFinder):
    """Loads the modules in `ADJUSTED` and then adjusts them."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in ADJUSTED:
            return None
        spec: Any = PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def execute_and_adjust(module: ModuleType) -> None:
            execute(module)
            ADJUSTED[name](module)

        spec.loader.exec_module = execute_and_adjust
        return spec


ABSENT = {"sgl_kernel": register_native_functions, "torchvision": None}
sys.meta_path[:0] = [AbsentPackages(ABSENT), AdjustedModules()]
