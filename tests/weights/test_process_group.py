"""The order of buckets in a weight group, and the end of a step that is aborted."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest.mock import Mock

import pytest
import torch

from dppo_megatron.weights.broadcast_plan import TensorSpec, WeightGroupPlan, bucket_bytes, make_buckets, views
from dppo_megatron.weights.process_group import WeightGroupError, WeightRendezvous


def test_scales_travel_with_their_weights_in_few_aligned_buckets():
    specs = []
    for layer in range(10):
        specs.append(TensorSpec(f"{layer}.weight", "float8_e4m3fn", (12, 10)))
        specs.append(TensorSpec(f"{layer}.weight_scale_inv", "float32", (1, 1)))
    buckets = make_buckets(
        [*specs, TensorSpec("odd", "float8_e4m3fn", (3,)), TensorSpec("norm", "bfloat16", (4,))], 10**6
    )
    assert [len(bucket) for bucket in buckets] == [21, 1]
    for bucket in buckets:
        flat = torch.arange(bucket_bytes(bucket)).to(torch.uint8)
        parts = [tensor.contiguous().reshape(-1).view(torch.uint8) for _, tensor in views(flat, bucket)]
        assert torch.equal(torch.cat(parts), flat)


def test_a_bucket_under_way_ends_when_its_step_is_aborted():
    """The sender froze: it keeps its connections, and is silent for as long as a step may take."""
    rendezvous = WeightRendezvous.host("group", 1, 30.0, loopback=True)
    visit = partial(WeightRendezvous.connect, "127.0.0.1", rendezvous.port, "group", 1, 30.0)
    joined = partial(rendezvous.channel, "sender", 0, "gloo", "127.0.0.1", torch.device("cpu"))
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(joined)
        channel = visit().channel("sender", 1, "gloo", "127.0.0.1", torch.device("cpu"))
        frozen = sending.result()
        receiving = pool.submit(lambda: channel.finish(channel.broadcast(torch.empty(9)), "step"))
        time.sleep(0.1)
        visit().abort("step", "engine-1 froze")
        with pytest.raises(WeightGroupError, match="aborted: engine-1 froze"):
            receiving.result(timeout=5)
    channel.close()
    frozen.close()


def test_nccl_groups_have_no_watchdog(monkeypatch):
    """It would end the whole process when a peer is lost. The variable is read by the constructor."""
    seen = []

    class Nccl(Mock):
        Options = Mock

        def __init__(self, *_):
            super().__init__()
            seen.append(os.environ.get("TORCH_NCCL_BLOCKING_WAIT"))

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    WeightRendezvous.host("group", 1, 5.0, loopback=True).channel("sender", 0, "nccl", "127.0.0.1")
    assert seen == ["1"]
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ


def test_experts_of_a_layer_come_together_from_all_senders():
    """A vLLM worker buffers a layer's experts until it has all of them: that must be one layer, not the model.

    Four senders, as expert-parallel ranks are: the first sends the dense weights as well.
    """

    def stream(sender: int):
        dense = [f"model.layers.{layer}.mlp.shared_experts.up_proj.weight" for layer in range(3 if sender == 0 else 0)]
        parts = [f"{sender}.{part}_proj.weight" for part in ("up", "down")]
        experts = [f"model.layers.{layer}.mlp.experts.{part}" for layer in range(3) for part in parts]
        return make_buckets([TensorSpec(name, "float32", (2,)) for name in dense + experts], 10**6)

    streams = tuple(map(stream, range(4)))
    whole = WeightGroupPlan("group", "127.0.0.1", 1, "gloo", 5.0, 1, streams)
    order = list(WeightGroupPlan.from_json(json.loads(json.dumps(whole.to_json()))).order())
    assert [(sender, number) for sender, number, _ in order] == [
        *((0, 0), (0, 1), (1, 0), (2, 0), (3, 0)),  # dense; then layer 0
        *((0, 2), (1, 1), (2, 1), (3, 1)),
        *((0, 3), (1, 2), (2, 2), (3, 2)),
    ]
    assert all(bucket == streams[sender][number] for sender, number, bucket in order)
