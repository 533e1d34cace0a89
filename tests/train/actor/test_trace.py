"""Recorded and replaced values of a pass do not depend on how the model is sharded."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dppo_megatron.lab.certify.compare import FIRST, LAST, OF_A_LAYER
from tests.support.actor_cases import VOCAB
from tests.support.actor_ranks import Rank, on_ranks

pytestmark = pytest.mark.slow

SP = {"tensor": 2, "sequence": True}
LAYOUTS = {
    "qwen3": {"data": {}, "tensor": {"tensor": 2}, "sequence": SP, "pipeline": {"pipeline": 2}},
    "qwen3_moe": {"data": {}, "sequence": SP, "expert": {"expert": 2}},
}


@pytest.mark.parametrize("model", LAYOUTS)
@on_ranks(2)
def test_every_layout_records_the_values_of_one_rank(rank: Rank, model: str):
    """The policy's values, and those of operators with noise as input; every value has a name and its place."""
    from dppo_megatron.train.actor.trace import trace

    noise = expected = None
    for name, layout in LAYOUTS[model].items():
        with rank.actor(model, **layout) as actor:
            own = trace(actor, batch())
            if noise is None:
                noise = _noise(own)
            found = own, trace(actor, batch(), noise)
        expected = expected or found
        for got, wanted in zip(found, expected, strict=True) if rank.rank == 0 else ():  # which has them
            assert got.keys() == wanted.keys(), name
            for key, value in wanted.items():
                torch.testing.assert_close(got[key], value, rtol=1e-4, atol=1e-4, msg=f"{name}: {key}")
    if rank.rank > 0:
        return
    layers = range(1 + max(layer for layer, _ in own))
    routed = {layer for layer, operator in own if operator == "router_logits"}
    if model == "qwen3":
        inside = [operator for operator in OF_A_LAYER if operator != "router_logits"]
        assert own.keys() == {(-1, o) for o in (*FIRST, *LAST)} | {(n, o) for n in layers for o in inside}
    else:
        assert routed
        assert not any((layer, "mlp_gate") in own for layer in routed)


def batch():
    """One sequence of 11 tokens: padded for two ranks."""
    from dppo_megatron.train.actor.batch.packing import sequence

    return sequence(np.arange(3, 14) % VOCAB)


def _noise(own: dict) -> dict:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(3)
    shared = [{key: torch.randn(value.shape, generator=generator) for key, value in own.items()}]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


@on_ranks(2)
def test_parts_of_a_sequence_are_refused(rank: Rank):
    from dppo_megatron.train.actor.trace import CannotTrace, trace

    parts = r"parallel\.context = 2: each rank has only parts"
    with rank.actor("qwen3", context=2) as actor, pytest.raises(CannotTrace, match=parts):
        trace(actor, batch())
