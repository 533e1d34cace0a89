"""`engine.exact` on the trainer's side: the same bits however sequences are packed, the same training as without it."""

import pytest
import torch

from tests.actor.scenarios.exact import LAYOUTS, changed_layers, compiles, exact, merged
from tests.actor.scenarios.served import DTYPES_OF, MODELS, served

CASES = [(size, name) for size, layouts in LAYOUTS.items() for name in layouts]


@pytest.fixture
def results(one_rank, two_ranks):
    return {1: one_rank, 2: two_ranks}


@pytest.mark.parametrize(("size", "name"), CASES)
def test_a_sequence_has_the_same_bits_beside_others(results, size, name):
    packed, alone, _, _ = results[size](exact)[name]
    assert torch.equal(packed, alone)


def test_shards_added_in_their_order_are_the_same_in_every_layout_of_them(results):
    of_layout = results[2](exact)
    assert torch.equal(of_layout["tensor"][0], of_layout["sequence"][0])


@pytest.mark.parametrize(("size", "name"), [(1, "alone"), (2, "tensor")])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", DTYPES_OF)
def test_a_server_that_decodes_has_the_bits_of_the_packed_pass(results, size, name, model, dtype):
    trained, scored = results[size](served)[model, dtype, name]
    assert torch.equal(trained, scored)


@pytest.mark.parametrize(("size", "name"), CASES)
def test_it_trains_as_without(results, size, name):
    _, _, trained, expected = results[size](exact)[name]
    for key, values in expected.items():
        if key != "masked_tokens":
            torch.testing.assert_close(
                torch.as_tensor(trained[key]), torch.as_tensor(values), rtol=1e-4, atol=1e-4, msg=key
            )


@pytest.mark.parametrize("size", [1, 2])
def test_an_engine_merges_shards_as_the_ranks_do(results, size):
    for trainer, engine in results[size](merged):
        assert torch.equal(trainer, engine)


def test_without_the_setting_the_layers_are_those_of_other_runs(one_rank):
    assert one_rank(changed_layers) == (
        set(),
        {"core_attention", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "output_layer"},
    )


def test_nothing_is_compiled_for_an_engine_computes_in_another_process(one_rank):
    assert one_rank(compiles) == (True, False)
