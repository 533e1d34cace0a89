"""Hook an SGLang server so that it reports weight fingerprints and serves adapters and deltas.

SGLang finds the metadata next to this file because the server's PYTHONPATH names the folder (see
`rollout/engines/sglang/kind.py`). dppo_megatron is not installed in the SGLang environment.

- /weights_checker reports fingerprints of the parameters, which are loaded in place and used unchanged, and of the
  adapter that the kernels read. It also reports the NCCL version and the recorded values of a forward pass.
- With --enable-lora, /update_weights_from_disk takes a directory with an adapter. The new adapter replaces the old
  adapter and answers every request. If requests named an adapter, they would keep the old adapter until they end, and
  report the new version.
- /update_weights_from_disk also takes a directory with a delta (`weights/delta.py`). /weights_checker prefetches a
  delta.
- /release_memory_occupation and /resume_memory_occupation may be repeated, because a reply can be lost. Without the
  hooks SGLang's scheduler would exit on the second request.
- Joining a weight group over Gloo times out, because a server answers nothing while it joins.
- With `engine.exact` the server computes as the trainer does (`exact_server.py`).
"""

from __future__ import annotations

import base64
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

FINGERPRINT = "dppo_fingerprint"
MISSING = "missing"  # reported instead of the two numbers for a group without a fingerprint
NCCL = "dppo_nccl"
CUMEM = "NCCL_CUMEM_ENABLE"  # SGLang sets it before starting the workers
START_TRACE = "dppo_start_trace"  # followed by the token ids
TAKE_TRACE = "dppo_take_trace"
EXACT = "DPPO_EXACT"  # environment variable for a server with engine.exact
GROUP_TIMEOUT = "DPPO_GROUP_TIMEOUT_S"  # environment variable: weight_sync.timeout_s
READ_AHEAD = "dppo_read_ahead"  # followed by the number of bytes to buffer at most, and the directory
HAS_READ = "dppo_has_read"
STATE = "state"  # reply key; the value is READING, READ, or the error text
READING, READ = "reading", "read"
PACKAGE = Path(__file__).parents[4]
TRACE, GUARD = "rollout.engines.trace", "rollout.engines.guard.asgi"
ADAPTER_CONFIG = "adapter_config.json"
POLICY = "policy"  # name of the only adapter in SGLang

Original = Callable[..., Any]  # the function that a hook wraps
_recorders: list[Any] = []  # at most one recorder
_prefetched: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # model -> version that is prefetched for it
_loading: list[Any] = []  # the prefetched version that is being loaded
_managers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # model -> SGLang's manager for the served adapter


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    updates = "sglang.srt.model_executor.model_runner_components.weight_updater"
    updater = f"{updates}.WeightUpdater"
    loader = "sglang.srt.model_loader.loader.DefaultModelLoader"
    manager = "sglang.srt.lora.lora_manager.LoRAManager"
    memory = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    rendezvous.TCPStore = _loaded("common.local_store").LocalStore  # of the schedulers, which are on one node
    HookRegistry.register("sglang.srt.utils.weight_checker.WeightChecker.handle", handle, HookType.AROUND)
    HookRegistry.register(f"{updater}.update_weights_from_disk", update_from_disk, HookType.AROUND)
    HookRegistry.register(f"{updates}.init_custom_process_group", join_group, HookType.AROUND)
    HookRegistry.register(f"{loader}._get_weights_iterator", weights_iterator, HookType.AROUND)
    HookRegistry.register(f"{manager}.fetch_new_loras", fetch, HookType.AROUND)
    HookRegistry.register(f"{manager}.prepare_lora_batch", prepare, HookType.AROUND)
    HookRegistry.register(f"{memory}.release_memory_occupation", release, HookType.AROUND)
    HookRegistry.register(f"{memory}.resume_memory_occupation", resume, HookType.AROUND)
    if EXACT in os.environ:
        _loaded("rollout.engines.sglang.plugin.exact_server").register()


def handle(original: Original, checker: Any, action: str, *arguments: Any, role: Any, **options: Any) -> Any:
    if action == FINGERPRINT:
        shares = weights_fingerprint(checker._get_model())
        reported = {group: MISSING if share is None else "{} {}".format(*share) for group, share in shares.items()}
    elif action == NCCL:
        reported = {NCCL: nccl_version(), CUMEM: os.environ.get(CUMEM, "")}
    elif action.startswith(START_TRACE):
        _recorders[:] = [_loaded(TRACE).TraceRecorder(checker._get_model(), list(map(int, action.split()[1:])))]
        reported = {}
    elif action == TAKE_TRACE:
        reported = {f"{layer}/{operator}": _text(value) for (layer, operator), value in _recorders.pop().take().items()}
    elif action.startswith(READ_AHEAD):
        reported = {STATE: read_ahead(checker._get_model(), *action.split(maxsplit=2)[1:])}
    elif action == HAS_READ:
        reported = {STATE: has_read(checker._get_model())}
    else:
        return original(checker, action, *arguments, role=role, **options)
    return {
        "checksums": reported,
        "per_gpu_checksum": "",
        "parallelism_info": checker._parallelism_info(role=role).model_dump(),
    }


def nccl_version() -> str:
    import torch

    return ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else ""


def weights_fingerprint(model: Any) -> dict[str, tuple[int, int] | None]:
    fingerprint, counted_ids = _ours("fingerprint"), set[int]()
    shares: dict[str, tuple[int, int] | None] = {}
    for name, module in model.named_modules():
        if name.endswith(".fused_qkv_a_proj_with_mqa"):  # this layer does not report the part sizes
            module.output_partition_sizes = [(r := model.config.q_lora_rank), module.output_size - r]
        if not hasattr(module, "lora_backend"):  # a layer under an adapter appears again as its base layer
            fingerprint.add_shares(shares, fingerprint.module_shares(name, module, counted_ids))
    manager = _managers.get(model)
    if manager is None or POLICY not in manager.loras:
        return shares
    slot, rank = manager.memory_pool.get_buffer_id(POLICY), manager.loras[POLICY].config.r
    for modules in manager.lora_modules:
        for name, module in modules.items():
            a, b = module.lora_a[slot], module.lora_b[slot][:, :rank]
            a_parts = a[: len(a) // manager.max_lora_rank * rank].split(rank)
            parts = [b[top:bottom] for top, bottom in pairwise(module.lora_offsets)]
            adapter_shares = fingerprint.adapter_shares(name, module.base_layer, a_parts, parts)
            fingerprint.add_shares(shares, adapter_shares)
    return shares


def read_ahead(model: Any, most_bytes: str, directory: str) -> str:
    """Start reading the version that /update_weights_from_disk will load."""
    guard = _loaded(GUARD)
    previous = _prefetched.pop(model, None)
    if previous is not None:
        previous.drop()
    try:
        guard.inside_roots(directory, guard.roots_of_environment())
        _prefetched[model] = _ours("delta").PrefetchedVersion(_ours("delta").Version(Path(directory)), int(most_bytes))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return READING


def has_read(model: Any) -> str:
    prefetched = _prefetched.get(model)
    try:
        return READ if prefetched is None or prefetched.finished() else READING
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def join_group(original: Original, *arguments: Any, **options: Any) -> Any:
    """Limit the wait for a Gloo group to form, and for each collective in the group, to `GROUP_TIMEOUT`.

    By default torch waits 30 minutes for a frozen member. An NCCL group keeps its timeout, because the NCCL watchdog
    ends the process at that limit.
    """
    if options.get("backend") == "gloo" and GROUP_TIMEOUT in os.environ:
        options["timeout"] = timedelta(seconds=float(os.environ[GROUP_TIMEOUT]))
    return original(*arguments, **options)


def update_from_disk(
    original: Original, updater: Any, model_path: str, load_format: str, **options: Any
) -> tuple[bool, str]:
    manager = updater.get_model_runner().lora_manager
    is_adapter = (Path(model_path) / ADAPTER_CONFIG).is_file()
    if manager is None and not is_adapter:
        return update_whole(original, updater, model_path, load_format, **options)
    if manager is None:
        return False, f"{model_path}: is an adapter; start the server with --enable-lora and --max-lora-rank"
    if not is_adapter:
        return False, f"{model_path}: not an adapter; start the server without --enable-lora to load it"
    try:
        load_adapter(manager, model_path)
    except Exception as error:  # an exception would end the server
        return False, f"{model_path}: {type(error).__name__}: {error}"
    return True, "Succeeded to load the adapter."


def update_whole(
    original: Original, updater: Any, model_path: str, load_format: str, **options: Any
) -> tuple[bool, str]:
    prefetched = _prefetched.pop(updater.get_model(), None)
    _loading[:] = [prefetched] if prefetched is not None and prefetched.version.is_in(Path(model_path)) else []
    try:
        return original(updater, model_path, load_format, **options)
    except _ours("delta").DamagedDelta as error:  # an exception would end the server
        return False, str(error)
    finally:
        _loading.clear()


def weights_iterator(original: Original, loader: Any, source: Any, **options: Any) -> Iterator[tuple[str, Any]]:
    if _loading:
        return ((source.prefix + name, tensor) for name, tensor in _loading[0].tensors())
    delta = _ours("delta")
    directory = Path(source.model_or_path)
    if not delta.is_delta(directory):
        return original(loader, source, **options)
    return ((source.prefix + name, tensor) for name, tensor in delta.Version(directory).tensors())


def load_adapter(manager: Any, directory: str) -> None:
    """Replace the adapter that the kernels read."""
    from sglang.srt.lora.lora_registry import LoRARef

    _managers[manager.base_model] = manager
    adapter = LoRARef(lora_id=POLICY, lora_name=POLICY, lora_path=str(directory), pinned=False)
    for step in (manager.unload_lora_adapter, manager.load_lora_adapter):
        result = step(adapter)
        if not result.success:
            raise RuntimeError(result.error_message)
    manager.fetch_new_loras({POLICY})


def fetch(original: Original, manager: Any, new_loras: Iterable[Any], running_loras: Iterable[Any] = ()) -> Any:
    return original(manager, *(set(_answered_by(manager, names)) for names in (new_loras, running_loras)))


def prepare(original: Original, manager: Any, forward_batch: Any) -> Any:
    forward_batch.lora_ids = _answered_by(manager, forward_batch.lora_ids)
    return original(manager, forward_batch)


def _answered_by(manager: Any, names: Iterable[str | None]) -> list[str | None]:
    """Return the adapter ids. Requests without an adapter get the policy's adapter, once it is loaded."""
    return [POLICY if name is None and POLICY in manager.loras else name for name in names]


def release(original: Original, manager: Any, request: Any) -> Any:
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqOutput

    return ReleaseMemoryOccupationReqOutput() if manager.offload_tags else original(manager, request)


def resume(original: Original, manager: Any, request: Any) -> Any:
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqOutput

    return original(manager, request) if manager.offload_tags else ResumeMemoryOccupationReqOutput()


def _text(value: Any) -> str:
    """Return dtype, shape and bits in base64 as text, for example "float32 2x3 AACAPw..."."""
    import torch

    bits = base64.b64encode(value.contiguous().view(torch.uint8).numpy().tobytes()).decode()
    return f"{str(value.dtype).removeprefix('torch.')} {'x'.join(map(str, value.shape))} {bits}"


def _ours(name: str) -> ModuleType:
    """Import a module in the folder `weights`."""
    return _loaded(f"weights.{name}")


def _loaded(name: str) -> ModuleType:
    """Import a module of this package from the files around this file. It must depend only on torch and safetensors."""
    if PACKAGE.name not in sys.modules:
        spec: Any = importlib.util.spec_from_file_location(PACKAGE.name, PACKAGE / "__init__.py")
        sys.modules[PACKAGE.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[PACKAGE.name])
    return importlib.import_module(f"{PACKAGE.name}.{name}")
