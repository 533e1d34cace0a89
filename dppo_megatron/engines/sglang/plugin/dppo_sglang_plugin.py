"""Adds to SGLang's /weights_checker: the fingerprints of what a worker's model holds, and its version of NCCL.

SGLang finds the metadata beside this file because the server's PYTHONPATH names the folder (see
`engines/sglang/server.py`); nothing of dppo_megatron is installed in its environment. Its weights are loaded in place
and computed with as they are, so the parameters are what it holds.
"""

import importlib.util
from pathlib import Path

HELD_WEIGHTS = "dppo_held_weights"
UNTOLD = "untold"  # instead of the two numbers of a group
NCCL = "dppo_nccl"
FINGERPRINT = Path(__file__).parents[3] / "weights" / "fingerprint.py"


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.utils.weight_checker.WeightChecker.handle", handle, HookType.AROUND)


def handle(original, checker, action, *arguments, role, **options):
    if action == HELD_WEIGHTS:
        shares = held_weights(checker._get_model())
        reported = {group: UNTOLD if share is None else "{} {}".format(*share) for group, share in shares.items()}
    elif action == NCCL:
        reported = {NCCL: nccl_version()}
    else:
        return original(checker, action, *arguments, role=role, **options)
    return {
        "checksums": reported,
        "per_gpu_checksum": "",
        "parallelism_info": checker._parallelism_info(role=role).model_dump(),
    }


def nccl_version():
    import torch

    return ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else ""


def held_weights(model):
    fingerprint, shares, seen = _fingerprint(), {}, set()
    for name, module in model.named_modules():
        fingerprint.add_shares(shares, fingerprint.module_shares(name, module, seen))
    return shares


def _fingerprint():
    spec = importlib.util.spec_from_file_location("dppo_fingerprint", FINGERPRINT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
