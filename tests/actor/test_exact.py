"""With `engine.exact` the trainer computes the same bits in every packing, and trains as without it."""

import pytest
import torch

from tests.actor.scenarios.exact import LAYOUTS, changed_layers, compiles, exact, merged
from tests.actor.scenarios.served import DTYPES_OF, MODELS, served

CASES = [(size, name) for size, layouts in LAYOUTS.items() for name in layouts]


@pytest.mark.parametrize(("size", "name"), CASES)
def test_a_sequence_has_the_same_bits_beside_others(on, size, name):
    packed, alone, _, _ = on(size, exact)[name]
    assert torch.equal(packed, alone)


def test_shards_added_in_their_order_are_the_same_in_every_layout_of_them(on):
    of_layout = on(2, exact)
    assert torch.equal(of_layout["tensor"][0], of_layout["sequence"][0])


@pytest.mark.parametrize(("size", "name"), [(1, "alone"), (2, "tensor")])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", DTYPES_OF)
def test_a_server_that_decodes_has_the_bits_of_the_packed_pass(on, size, name, model, dtype):
    trained, scored = on(size, served)[model, dtype, name]
    assert torch.equal(trained, scored)


@pytest.mark.parametrize(("size", "name"), CASES)
def test_it_trains_as_without(on, size, name):
    _, _, trained, expected = on(size, exact)[name]
    for key, values in expected.items():
        if key != "masked_tokens":
            torch.testing.assert_close(
                torch.as_tensor(trained[key]), torch.as_tensor(values), rtol=1e-4, atol=1e-4, msg=key
            )


@pytest.mark.parametrize("size", [1, 2])
def test_an_engine_merges_shards_as_the_ranks_do(on, size):
    for trainer, engine in on(size, merged):
        assert torch.equal(trainer, engine)


def test_without_the_setting_the_layers_are_those_of_other_runs(one_rank):
    assert one_rank(changed_layers) == (
        set(),
        {"core_attention", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "output_layer"},
    )


def test_nothing_is_compiled_for_an_engine_computes_in_another_process(one_rank):
    assert one_rank(compiles) == (True, False)
