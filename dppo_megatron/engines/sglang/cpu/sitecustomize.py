"""Lets SGLang run on a machine without CUDA, where its native packages have no build.

Python reads this file at start because the server's PYTHONPATH names this directory (see `engines/sglang/kind.py`).

- `sgl_kernel` (no CPU build is published) and `torchvision` (its published build is for the CUDA torch) become stub
  modules. Any attribute can be imported from a stub and raises when called, so a completed run called none of them. The
  run needs one native function, the hash of seeded sampling, which `seeded_sampling` implements.
- Seeded sampling needs `--enable-deterministic-inference`, which supports only GPU attention and replaces GPU kernels.
  Here it accepts the CPU's own torch attention, one request at a time, and replaces no kernels.
- Returning routed experts pins its host buffer through CUDA even on a machine without CUDA. Adapters (LoRA, by SGLang's
  backend in plain torch) pin their batch tables. The pinning is skipped.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from functools import partial

ABSENT = ("sgl_kernel", "torchvision")


class Absent:
    """A stub for any attribute of an absent package: its attributes are stubs too, and a call raises."""

    def __init__(self, name):
        self.__name__ = name

    def __getattr__(self, attribute):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Absent(f"{self.__name__}.{attribute}")

    def __call__(self, *_args, **_kwargs):
        raise NotImplementedError(f"{self.__name__}: not available in SGLang's CPU environment")


class AbsentModule(types.ModuleType):
    __path__ = ()
    __version__ = "0.0.0+absent"

    def __getattr__(self, attribute):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Absent(f"{self.__name__}.{attribute}")


class AbsentPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return AbsentModule(spec.name)

    def exec_module(self, module):
        if module.__name__ == "sgl_kernel":
            import seeded_sampling

            module.library = seeded_sampling.register()


def admit_torch_attention(module):
    module.add_deterministic_attention_backend_choices(["torch_native"])


def replace_no_kernels(module):
    module.enable_batch_invariant_mode = lambda *_args, **_kwargs: None


def skip_pinning(module):
    module._cuda_host_register = lambda *_args, **_kwargs: None


class TorchWithoutPinning:
    """A replacement for torch that ignores `pin_memory` in its factory functions."""

    def __getattr__(self, name):
        import torch

        found = getattr(torch, name)
        return partial(_unpinned, found) if name in ("tensor", "zeros") else found


def _unpinned(factory, *arguments, pin_memory=False, **options):
    return factory(*arguments, **options)


def skip_pinning_of_adapters(module):
    module.torch = TorchWithoutPinning()
    import torch

    torch.Tensor.pin_memory = lambda tensor, *_args: tensor


ADJUSTED = {
    "sglang.srt.arg_groups.choices": admit_torch_attention,
    "sglang.srt.batch_invariant_ops": replace_no_kernels,
    "sglang.srt.lora.backend.torch_backend": skip_pinning_of_adapters,
    "sglang.srt.lora.layers": skip_pinning_of_adapters,
    "sglang.srt.mem_cache.pool_host.common": skip_pinning,
}


class AdjustedModules(importlib.abc.MetaPathFinder):
    """Import hook that loads a module and then adjusts it."""

    def find_spec(self, name, path=None, target=None):
        if name not in ADJUSTED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def execute_and_adjust(module):
            execute(module)
            ADJUSTED[name](module)

        spec.loader.exec_module = execute_and_adjust
        return spec


sys.meta_path[:0] = [AbsentPackages(), AdjustedModules()]
