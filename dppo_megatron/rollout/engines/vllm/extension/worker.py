"""Load weights in a worker, from a directory on shared storage or from broadcasts by trainer ranks.

Importing this module registers the weight transfer engine and makes the process end with its parent. Name
`WorkerExtension` as --worker-extension-cls so that every worker imports this module, and `{"backend": BACKEND}` as
--weight-transfer-config.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.config import ModelConfig, get_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader import base_loader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from dppo_megatron.common.process import end_with_parent
from dppo_megatron.rollout.engines import exact
from dppo_megatron.rollout.engines.trace import TraceRecorder
from dppo_megatron.weights.broadcast_plan import WeightGroupPlan
from dppo_megatron.weights.delta import PrefetchedVersion, Version
from dppo_megatron.weights.fingerprint import WorkerSums, add_shares, expert_parts, place
from dppo_megatron.weights.process_group import WeightGroupError

from . import adapter
from .experts import ExpertRecorder, moe_layers
from .loaded_weights import LoadedWeights
from .receiver import WeightReceiver
from .sampling_masks import MaskRecorder
from .wire import bits_of, dtype_name

log = logging.getLogger(__name__)

BACKEND = "dppo"


@dataclass
class InitInfo(WeightTransferInitInfo):
    plan: dict[str, Any]  # the WeightGroupPlan to join


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Names the source of an update. Exactly one of the two fields is set."""

    directory: str = ""  # the new policy in Hugging Face names: directory of a model or delta
    step: str = ""  # step in which the trainer now broadcasts to the joined group


class TrainerWeights(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads full weights in Hugging Face names through the model's own loaders, which shard and fuse them."""

    model: Any  # any architecture, with vLLM's `load_weights`
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._receiver: WeightReceiver | None = None
        self.loaded = LoadedWeights.for_model(self.model)
        self._prefetched: PrefetchedVersion | None = None  # prefetched for the next update
        self._loading: PrefetchedVersion | None = None  # version of the running update
        self._began = 0.0
        self.parts: dict[str, float] = {}  # part of the last update -> seconds

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.shutdown()
        plan = WeightGroupPlan.from_json(init_info.plan)
        self._receiver = WeightReceiver(plan, self.parallel_config.rank, self.device)

    def read_ahead(self, directory: Path, most_bytes: int) -> None:
        """Start reading the version that will be loaded next."""
        previous, self._prefetched = self._prefetched, None
        if previous is not None:
            previous.drop()
        self._prefetched = PrefetchedVersion(Version(directory), most_bytes)

    def has_read(self) -> bool:
        """Return whether the version has been read. Raises the error that occurred while reading."""
        return self._prefetched is None or self._prefetched.finished()

    def start_weight_update(self) -> None:
        self._began, self._loading = time.perf_counter(), None
        self.loaded.follow()
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if update_info.directory:
            self._loading = self._take(Path(update_info.directory))
            self.model.load_weights(_loadable(self.model, self._loading.tensors()))
            return
        if self._receiver is None:
            raise WeightGroupError("this worker is in no weight group")
        for bucket in self._receiver.receive(update_info.step):
            self.model.load_weights(_loadable(self.model, bucket))

    def _take(self, directory: Path) -> PrefetchedVersion:
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None and prefetched.version.is_in(directory):
            return prefetched
        return PrefetchedVersion(Version(directory), 0)

    def finish_weight_update(self) -> None:
        loading, self._loading = self._loading, None
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            with self.loaded.packing():
                _repack(self.model, self.loaded)
        self.parts = {
            "read_s": 0.0 if loading is None else loading.read_s,
            "pack_s": self.loaded.pack_s,
            "fingerprint_s": self.loaded.fingerprint_s,
        }
        self.parts["load_s"] = time.perf_counter() - self._began - sum(self.parts.values())

    def shutdown(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None


def _loadable(model: torch.nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield `tensors` in a form for which vLLM calls the parameters' loaders. Load gpt-oss's sinks directly.

    vLLM copies gpt-oss's stacked experts and sinks to the parameters without the loaders. A layerwise reload keeps only
    loaded values. Without this function the server would continue with the old experts and sinks, and report success.
    """
    for name, tensor in tensors:
        if not name.endswith(".sinks"):
            yield from expert_parts(name, tensor)
            continue
        attention = name.removesuffix(".sinks").replace(".self_attn", ".attn")
        layer: Any = dict(model.named_modules()).get(attention)
        if layer is not None:  # else another stage has it
            rank, size = place(layer)
            layer.sinks.weight_loader(layer.sinks, tensor.chunk(size)[rank])


def _repack(model: torch.nn.Module, loaded: LoadedWeights) -> None:
    """Repack the copies in CPU kernels that a layerwise reload leaves stale.

    A head tied to the embedding loads no weights, so its copy is not repacked. vLLM packs expert weights on the first
    load only. In both cases the server would continue with the old weights and report success.
    """
    module: Any
    for module in model.modules():
        if hasattr(module, "cpu_linear") and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)
        experts: Any = getattr(module, "routed_experts", None)
        kernel = getattr(getattr(experts, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            loaded.processed(experts, kernel.fused_experts.process_weights_after_loading)


def _problem(action: Callable[[], None]) -> str | None:
    try:
        action()
    except Exception as error:
        log.exception("a weight update failed in this worker")
        return str(error) or type(error).__name__
    return None


class WorkerExtension:
    """Adds methods to every worker and uses the worker's attributes below.

    Naming this class also makes every worker import this module.
    """

    model_runner: Any
    model_config: ModelConfig
    weight_transfer_engine: TrainerWeights
    init_weight_transfer_engine: Callable[[dict[str, Any]], None]
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]

    def dppo_join_weight_group(self, plan: dict[str, Any]) -> str | None:
        """Join the group. Return why it failed, or None: an exception would put vLLM's reply queues out of order."""
        return _problem(lambda: self.init_weight_transfer_engine({"plan": plan}))

    def dppo_read_ahead(self, directory: str, most_bytes: int) -> str | None:
        """Start reading the version that `dppo_update_weights` will load. Return why it failed, or None."""
        return _problem(lambda: self.weight_transfer_engine.read_ahead(Path(directory), most_bytes))

    def dppo_has_read(self) -> bool | str:
        """Return whether the version has been read, or why it cannot be."""
        try:
            return self.weight_transfer_engine.has_read()
        except Exception as error:
            return str(error) or type(error).__name__

    def dppo_update_parts(self) -> dict[str, float]:
        """Return how long each part of the last update took, in seconds: read_s, load_s, pack_s and fingerprint_s."""
        return self.weight_transfer_engine.parts

    def dppo_update_weights(self, info: dict[str, Any]) -> str | None:
        """Run a whole update from an `UpdateInfo`. Return why it failed, or None."""

        def update() -> None:
            self._weight_update_active = False  # a failed update leaves it set
            self.start_weight_update()
            self.update_weights(info)
            self.finish_weight_update()

        return _problem(update)

    def dppo_load_adapter(self, directory: str) -> str | None:
        """Serve the adapter in `directory` to requests that name it. Return why it failed, or None."""
        return _problem(lambda: adapter.load(self.model_runner, directory))

    def dppo_fingerprint(self) -> WorkerSums:
        """Return fingerprints for this worker's share of the weights and the adapter."""
        shares = self.weight_transfer_engine.loaded.shares()
        add_shares(shares, adapter.adapter_shares(self.model_runner))
        return shares

    def dppo_start_trace(self, token_ids: list[int]) -> None:
        """Record the values inside the pass that reads these tokens."""
        self._dppo_trace = TraceRecorder(self.model_runner.model, token_ids)

    def dppo_take_trace(self) -> list[tuple[int, str, bytes, str, tuple[int, ...]]]:
        """Return (layer, operator, bits, dtype, shape) for every value recorded since `dppo_start_trace`."""
        entries = self._dppo_trace.take().items()
        return [(*key, bits_of(value).tobytes(), dtype_name(value.dtype), tuple(value.shape)) for key, value in entries]

    def dppo_moe_layers(self) -> list[int]:
        """Return the numbers of all layers with experts."""
        return [number for number, _ in moe_layers(self.model_runner.model)]

    def dppo_record_experts(self) -> list[int]:
        """Start recording the experts for requests that ask for it. Return the layer numbers."""
        self._dppo_experts = ExpertRecorder(self.model_runner, self.model_config.get_num_experts())
        return self.dppo_moe_layers()

    def dppo_take_experts(self, names: list[str]) -> list[tuple[bytes, str, tuple[int, ...]] | None]:
        """Remove the requests' records. Return (data, dtype, shape) for each request, or None if it has no record."""
        records = [self._dppo_experts.take(name) for name in names]
        return [None if r is None else (r.tobytes(), r.dtype.name, r.shape) for r in records]

    def dppo_draft(self) -> None:
        """Start drafting from earlier samples. The server must have `BankDrafts`."""
        self.model_runner.drafter.attach(self.model_runner)

    def dppo_record_masks(self) -> None:
        """Start recording the sampling masks for requests that ask for it."""
        self._dppo_masks = MaskRecorder(self.model_runner)

    def dppo_take_masks(
        self, names: list[str], prompt_tokens: int, lengths: list[int]
    ) -> list[tuple[bytes, bytes] | None]:
        """Remove the requests' records. Return (ids, counts) for each response, or None if masks are missing."""
        records = [
            self._dppo_masks.take(*one) for one in zip(names, [prompt_tokens] * len(names), lengths, strict=True)
        ]
        return [None if r is None else (r[0].tobytes(), r[1].tobytes()) for r in records]


def _follow_first_load() -> None:
    """Follow the first load if the server takes adapters, because weights under an adapter are loaded only then."""
    process = base_loader.process_weights_after_loading

    def followed(model: torch.nn.Module, model_config: Any, target_device: Any) -> None:
        if get_current_vllm_config().lora_config is not None:
            LoadedWeights.for_model(model).follow()
        process(model, model_config, target_device)

    base_loader.process_weights_after_loading = followed


WeightTransferEngineFactory.register_engine(BACKEND, TrainerWeights)
_follow_first_load()
if (_operators := exact.from_environment()) is not None:
    from . import exact_server

    exact_server.install(_operators)
if (_server := multiprocessing.parent_process()) is not None and _server.pid is not None:
    end_with_parent(_server.pid, signal.SIGKILL)  # otherwise a killed server leaves engine and workers running
