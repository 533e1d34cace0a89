"""Recorded and replaced values of a pass do not depend on how the model is sharded."""

import pytest
import torch

from dppo_megatron.certify.compare import FIRST, LAST, OF_A_LAYER
from tests.actor.scenarios.traces import LAYOUTS, traces

pytestmark = pytest.mark.slow

CASES = [(model, name) for model, layouts in LAYOUTS.items() for name in layouts if name != "data"]


@pytest.mark.parametrize(("model", "name"), CASES)
@pytest.mark.parametrize("which", ["own", "of given values"])
def test_every_layout_records_what_one_rank_does(two_ranks, model, name, which):
    results, at = two_ranks(traces), ["own", "of given values"].index(which)
    expected, found = results[model, "data"][at], results[model, name][at]
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-4, msg=lambda text, key=key: f"{key}: {text}")


def test_every_value_has_a_name_and_its_place(two_ranks):
    own, _ = two_ranks(traces)["qwen3", "data"]
    inside = [operator for operator in OF_A_LAYER if operator != "router_logits"]
    layers = 1 + max(layer for layer, _ in own)
    assert own.keys() == {(-1, o) for o in (*FIRST, *LAST)} | {(n, o) for n in range(layers) for o in inside}


def test_a_layer_with_experts_records_its_router(two_ranks):
    own, _ = two_ranks(traces)["qwen3_moe", "data"]
    routed = {layer for layer, operator in own if operator == "router_logits"}
    assert routed
    assert not any((layer, "mlp_gate") in own for layer in routed)


def test_parts_of_a_sequence_are_refused(two_ranks):
    assert "parallel.context = 2: each rank has only parts" in two_ranks(traces)["context"]
