"""The text of a certificate, and its check of a bound."""

import math
from dataclasses import asdict

import numpy as np
import pytest
import torch

from dppo_megatron.lab.certify.certificate_text import exceeds, text
from dppo_megatron.lab.certify.compare import compare, logprob_table


def certificate(off: float, operators) -> dict:
    engine = np.array([-1.0, -2.0], dtype=np.float32)
    found = {} if isinstance(operators, str) else operators
    return {
        "engine": "vllm 0.32.0",
        "engine_dtype": "float32",
        "engine_model": "models/start",
        "trainer_dtype": "fp32",
        "layout": "1 ranks over gloo on cpu",
        "weights": "models/start, loaded by the engine",
        "samples": 1,
        "logprobs": {"engine sampled, trainer packed": logprob_table(engine, engine + np.float32(off))},
        "traced_tokens": 3,
        "operators": operators,
        "recorded": 7,
        "first": next((e["name"] for e in found.get("accumulated", ()) if e["differing"]), None),
        "first_beyond_rounding": None,
    }


def operators(off: float) -> dict:
    values = {(layer, "mlp"): torch.ones(2, 4) for layer in range(2)}
    others = {key: value + (off if key[0] else 0) for key, value in values.items()}
    entries = [{"name": difference.name, **asdict(difference)} for difference in compare(values, others)]
    return {"accumulated": entries, "own": entries}


@pytest.mark.parametrize(("off", "over"), [(0.0, False), (1e-3, True), (math.nan, True)])
def test_a_bound_is_exceeded_by_a_larger_difference_and_by_none(off, over):
    assert exceeds(certificate(off, "not available: why"), 1e-4) is over


def test_operators_that_an_engine_hides_are_reported_as_not_available():
    assert "operators: not available: the server compiles" in text(
        certificate(0.0, "not available: the server compiles")
    )


def test_equal_bits_are_reported_with_the_number_of_compared_values():
    said = "2 of 7 recorded values compared, {} of them have the same bits"
    assert said.format(2) in text(certificate(0.0, operators(0.0)))
    assert said.format(1) in text(certificate(0.0, operators(2**-20)))


def test_the_first_operator_and_each_kind_are_named():
    said = text(certificate(0.0, operators(2**-20)))
    assert "first to differ: layer 1 mlp: 100.0% of the elements, max 8 ULP" in said
    assert "no difference is larger than rounding" in said
