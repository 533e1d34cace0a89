"""A worker's fingerprint of an adapter covers the tensors that its kernels multiply with, shard by shard."""

import importlib
from collections.abc import Sequence
from itertools import accumulate
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from dppo_megatron.hf.peft import ADAPTER_CONFIG
from dppo_megatron.rollout.engines.sglang.plugin import dppo_sglang_plugin
from dppo_megatron.weights.fingerprint import Fingerprint, WorkerSums, add, join_workers
from dppo_megatron.weights.manifest import BadWeights

R, ROOM = 2, 8  # of the adapter, and of the slots
Column = type("ColumnParallelLinear", (), {})
QKV = type("QKVParallelLinear", (Column,), {})
Row = type("RowParallelLinear", (), {})
A = {name: torch.randn(R, 8, generator=torch.Generator().manual_seed(i)) for i, name in enumerate("qkvo")}
B = {name: torch.randn(4, R, generator=torch.Generator().manual_seed(9 + i)) for i, name in enumerate("qkvo")}


def vllm_adapter() -> ModuleType:
    """Import the module when a test runs: vLLM's imports take seconds."""
    return importlib.import_module("dppo_megatron.rollout.engines.vllm.extension.adapter")


def slots(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """[slots, 1, ...] as vLLM keeps it: an adapter of lower rank is padded with zeros."""
    padded = torch.zeros(*(ROOM if d == dim else n for d, n in enumerate(tensor.shape)))
    padded[tuple(slice(n) for n in tensor.shape)] = tensor
    return torch.stack([torch.full_like(padded, 7.0), padded])[:, None]


def worker(rank: int, size: int, replicas: int = 1) -> Any:
    """A worker's share of q, k, v in one layer and of o; its adapter is in the second slot."""

    def layer(kind: type, names: str, a_dim: int | None, b_dim: int | None, **sizes: int) -> Any:
        base = kind()
        vars(base).update(tp_rank=rank, tp_size=size, **sizes)

        def share(tensor: torch.Tensor, dim: int | None, name: str) -> torch.Tensor:
            parts = size if name in "qo" else size // replicas
            return tensor if dim is None else tensor.chunk(parts, dim)[rank * parts // size]

        return SimpleNamespace(
            base_layer=base,
            lora_a_stacked=tuple(slots(share(A[n], a_dim, n), 0) for n in names),
            lora_b_stacked=tuple(slots(share(B[n], b_dim, n), 1) for n in names),
        )

    modules = {
        "model.layers.3.self_attn.qkv_proj": layer(QKV, "qkv", None, 0, num_kv_head_replicas=replicas),
        "model.layers.3.self_attn.o_proj": layer(Row, "o", 1, None),
        "logits_processor": SimpleNamespace(base_layer=None),
        "lm_head": SimpleNamespace(  # has room, and the adapter nothing for it
            base_layer=Column(),
            lora_a_stacked=(torch.zeros(2, 1, ROOM, 8),),
            lora_b_stacked=(torch.zeros(2, 1, 4, ROOM),),
        ),
    }
    manager = SimpleNamespace(lora_index_to_id=[None, vllm_adapter().NUMBER], modules=modules)
    return SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager))


def sglang_shares(rank: int, size: int, replicas: int = 1) -> WorkerSums:
    """Return the sums of an SGLang worker with the same adapter: it stacks all A's and all B's, by the adapter's r."""

    def laid_out(parts: Sequence[torch.Tensor], room: int, dim: int) -> torch.Tensor:
        tensor = torch.cat(parts)
        held = torch.full((*tensor.shape[:dim], room, *tensor.shape[dim + 1 :]), 3.0)  # the rest is not read
        held.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
        return torch.stack([torch.full_like(held, 7.0), held])

    model, layers = torch.nn.Module(), {}
    for name, module in worker(rank, size, replicas).lora_manager._adapter_manager.modules.items():
        if ".layers." in name:
            a, b = [t[1, 0, :R] for t in module.lora_a_stacked], [t[1, 0, :, :R] for t in module.lora_b_stacked]
            layers[name] = SimpleNamespace(
                base_layer=module.base_layer,
                lora_a=laid_out(a, ROOM * len(a), 0),
                lora_b=laid_out(b, ROOM, 1),
                lora_offsets=(0, *accumulate(map(len, b))),
            )
    dppo_sglang_plugin._managers[model] = SimpleNamespace(
        loras={dppo_sglang_plugin.POLICY: SimpleNamespace(config=SimpleNamespace(r=R))},
        memory_pool=SimpleNamespace(get_buffer_id=lambda name: 1),
        max_lora_rank=ROOM,
        lora_modules=[{}, layers],
    )
    return dppo_sglang_plugin.weights_fingerprint(model)


def vllm_shares(*place: int) -> WorkerSums:
    return vllm_adapter().adapter_shares(worker(*place))


def sent() -> Fingerprint:
    out: Fingerprint = {}
    for name in "qkvo":
        for side, tensor in (("A", A[name]), ("B", B[name])):
            add(out, f"base_model.model.model.layers.3.self_attn.{name}_proj.lora_{side}.weight", tensor)
    return out


@pytest.mark.parametrize("shares", [vllm_shares, sglang_shares])
@pytest.mark.parametrize(("size", "replicas"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_workers_hold_the_adapter_that_was_sent(shares, size, replicas):
    held, unequal = join_workers([shares(rank, size, replicas) for rank in range(size)])
    assert not unequal
    assert held == sent()


def test_a_changed_value_and_a_missing_adapter_show():
    one = worker(0, 1)
    one.lora_manager._adapter_manager.modules["model.layers.3.self_attn.o_proj"].lora_b_stacked[0][1, 0, 2, 1] += 1e-6
    assert join_workers([vllm_adapter().adapter_shares(one)])[0] != sent()
    one.lora_manager._adapter_manager.lora_index_to_id = [None, None]
    assert vllm_adapter().adapter_shares(one) == {}
    assert vllm_adapter().adapter_shares(SimpleNamespace()) == {}


def test_a_server_takes_adapters_or_whole_models(tmp_path):
    """vLLM would load half of a whole model into layers that have an adapter, and then fail."""
    assert vllm_adapter().adapter_in(tmp_path, False) is None
    with pytest.raises(BadWeights, match="not an adapter; start the server without --enable-lora"):
        vllm_adapter().adapter_in(tmp_path, True)
    (tmp_path / ADAPTER_CONFIG).write_text("{}")
    with pytest.raises(BadWeights, match="start the server with --enable-lora"):
        vllm_adapter().adapter_in(tmp_path, False)
    assert vllm_adapter().adapter_in(tmp_path, True).lora_path == str(tmp_path)
