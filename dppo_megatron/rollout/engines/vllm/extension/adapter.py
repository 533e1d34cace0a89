"""Serve a policy that was published as an adapter, with vLLM's LoRA on top of the server's start weights.

The adapter's fingerprint is computed from the tensors that vLLM's kernels multiply with. It is added to the layers'
fingerprints (`weights.fingerprint`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest

from dppo_megatron.hf.peft import ADAPTER_CONFIG
from dppo_megatron.weights import fingerprint
from dppo_megatron.weights.fingerprint import WorkerSums, add_shares
from dppo_megatron.weights.manifest import BadWeights

NUMBER = 1  # vLLM's number for the only adapter


def adapter_in(directory: Path, enabled: bool) -> LoRARequest | None:
    """Return the adapter in `directory` as requests name it, or None for a directory with a whole model.

    `enabled`: the server was started with --enable-lora. Such a server keeps the start weights, because vLLM loads no
    others into layers under an adapter. Raises BadWeights for an adapter if not `enabled`, and for a model if
    `enabled`.
    """
    is_adapter = (directory / ADAPTER_CONFIG).is_file()
    if is_adapter and not enabled:
        raise BadWeights(f"{directory}: is an adapter; start the server with --enable-lora and --max-lora-rank")
    if enabled and not is_adapter:
        raise BadWeights(f"{directory}: not an adapter; start the server without --enable-lora to load a whole model")
    return LoRARequest(lora_name="policy", lora_int_id=NUMBER, lora_path=str(directory)) if is_adapter else None


def load(model_runner: Any, directory: str) -> None:
    """Replace the adapter in a worker, in the same slot."""
    request = LoRARequest(lora_name="policy", lora_int_id=NUMBER, lora_path=directory, load_inplace=True)
    model_runner.lora_manager.add_adapter(request)


def adapter_shares(model_runner: Any) -> WorkerSums:
    """Return fingerprint shares of the adapter tensors that this worker multiplies with, if any."""
    manager = getattr(getattr(model_runner, "lora_manager", None), "_adapter_manager", None)
    shares: WorkerSums = {}
    if manager is None or NUMBER not in manager.lora_index_to_id:
        return shares
    slot = manager.lora_index_to_id.index(NUMBER)
    for name, module in manager.modules.items():
        layer = getattr(module, "base_layer", None)
        if layer is None or not hasattr(module, "lora_a_stacked"):
            continue
        slot_tensors = ([t[slot] for t in getattr(module, side)] for side in ("lora_a_stacked", "lora_b_stacked"))
        add_shares(shares, fingerprint.adapter_shares(name, layer, *slot_tensors))
    return shares
