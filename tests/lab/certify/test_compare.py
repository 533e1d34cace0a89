"""ULPs, log-prob tables and the order of operators, on values with a known distance."""

import math

import numpy as np
import pytest
import torch

from dppo_megatron.errors import ExpectedError
from dppo_megatron.lab.certify.compare import (
    FIRST,
    LAST,
    NOT_A_NUMBER,
    OF_A_LAYER,
    compare,
    logprob_table,
    ulp_distance,
)
from dppo_megatron.train.actor.trace import OF_COLUMNS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_neighbours_are_one_ulp_apart_across_zero_and_powers_of_two(dtype):
    info = torch.finfo(dtype)
    size = dtype.itemsize
    tiny = torch.ones(1, dtype=torch.int32 if size == 4 else torch.int16).view(dtype)  # the smallest subnormal
    one = torch.ones(1, dtype=dtype)
    below = one - torch.tensor(info.eps / 2, dtype=dtype)
    pairs = [(tiny, -tiny, 2), (tiny, torch.zeros(1, dtype=dtype), 1), (one, below, 1), (one, one + info.eps, 1)]
    assert [int(ulp_distance(a.to(dtype), b.to(dtype))) for a, b, _ in pairs] == [n for _, _, n in pairs]
    assert int(ulp_distance(torch.zeros(1, dtype=dtype), -torch.zeros(1, dtype=dtype))) == 0


def test_a_number_is_far_from_none_and_two_that_are_none_are_alike():
    a = torch.tensor([math.nan, math.nan, math.inf, -math.inf])
    b = torch.tensor([1.0, math.nan, math.inf, math.inf])
    distance = ulp_distance(a, b)
    assert distance[:3].tolist() == [NOT_A_NUMBER, 0, 0]
    assert distance[3] > 2**31


EXACT = torch.tensor([[1.0, 2.0, 3.0]])


@pytest.mark.parametrize(
    ("engine", "trainer", "expected"),
    [
        (
            torch.tensor([[math.nan, 1.0]]),
            torch.ones(1, 2),
            {"beyond_rounding": True, "differing": 1, "roundings": math.inf},
        ),
        (torch.ones(2, 3), torch.ones(2, 4), {"differs": True, "beyond_rounding": True}),
        (EXACT.bfloat16(), EXACT + 1e-4, {"differs": False, "bytes": 2}),
        (
            torch.ones(1, 2),
            torch.tensor([[1.0, 2.0]]),
            {"elements": 2, "differing": 1, "max_ulp": 2**23, "largest": 1.0},
        ),
    ],
    ids=["NaN", "shapes", "coarser dtype", "row"],
)
def test_one_operator(engine, trainer, expected):
    (difference,) = compare({(0, "mlp"): engine}, {(0, "mlp"): trainer})
    assert {name: getattr(difference, name) for name in expected} == expected
    if engine.shape != trainer.shape:
        assert "[2, 3]" in difference.problem
        assert "[2, 4]" in difference.problem


@pytest.mark.parametrize(
    ("dtype", "off", "beyond"),
    [
        (torch.float32, 1e-7, False),
        (torch.float32, 1e-5, True),
        (torch.bfloat16, 4e-3, False),
        (torch.bfloat16, 4e-2, True),
    ],
)
def test_a_rounding_difference_is_distinguished_from_a_larger_one(dtype, off, beyond):
    values = torch.linspace(0.5, 2, 64)[None]
    (difference,) = compare({(3, "q_norm"): (values * (1 + off)).to(dtype)}, {(3, "q_norm"): values.to(dtype)})
    assert difference.beyond_rounding is beyond
    assert difference.name == "layer 3 q_norm"


def test_differences_come_in_the_order_of_the_computation():
    keys = [(-1, "logits"), (10, "residual"), (2, "mlp"), (2, "q_projection"), (-1, "embedding"), (-1, "final_norm")]
    values = {key: torch.ones(1, 1) for key in keys}
    ordered = ["embedding", "layer 2 q_projection", "layer 2 mlp", "layer 10 residual", "final_norm", "logits"]
    assert [difference.name for difference in compare(values, values)] == ordered


def test_values_that_only_one_side_recorded_are_left_out():
    engine, trainer = ({(0, "mlp"): torch.ones(1, 1), (0, own): torch.ones(1, 1)} for own in ("mlp_gate", "attention"))
    assert [difference.name for difference in compare(engine, trainer)] == ["layer 0 mlp"]
    assert compare(engine, {}) == [], "of other ranks than the first"


@pytest.mark.parametrize(
    ("engine", "trainer"),
    [
        ({(0, "attention"): 1.0}, {(0, "mlp"): 1.0}),
        ({(-1, "embedding"): 1.0, (0, "mlp"): 1.0}, {(-1, "embedding"): 1.0, (1, "mlp"): 1.0}),
        ({}, {(-1, "embedding"): 1.0}),
    ],
)
def test_traces_without_a_common_value_of_a_layer_are_refused(engine, trainer):
    of = ({key: torch.full((4, 8), value) for key, value in trace.items()} for trace in (engine, trainer))
    with pytest.raises(ExpectedError, match=f"engine {len(engine)} values, trainer {len(trainer)}"):
        compare(*of)


def test_every_sharded_operator_has_its_place():
    assert {*FIRST, *OF_A_LAYER, *LAST} >= OF_COLUMNS


def test_the_columns_of_the_log_prob_table_hold_their_statistics():
    engine = np.array([-1.0, -2.0, -0.5, -3.0], dtype=np.float32)
    trainer = engine + np.array([0.0, 0.5, -1e-3, 1e-5], dtype=np.float32)
    table = logprob_table(engine, trainer)
    log_ratio = trainer.astype(np.float64) - engine
    assert table["kl"] == pytest.approx(np.mean(np.exp(log_ratio) - 1 - log_ratio))
    assert table["largest"] == pytest.approx(0.5)
    assert (table["same_bits"], table["above_1e-06"], table["above_0.0001"], table["above_0.01"]) == (
        0.25,
        0.75,
        0.5,
        0.25,
    )
