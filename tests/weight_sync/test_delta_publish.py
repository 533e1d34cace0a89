"""Deltas from real trainer ranks give fake engines the bits of a whole publish, despite faults."""

from __future__ import annotations

import pytest

from tests.weight_sync.delta_scenarios import DAMAGED_BASE, DAMAGED_FILE, FULL_EVERY, LOST_REPLY, RESTARTED


@pytest.mark.parametrize(
    "name",
    ["deltas_short", *(pytest.param(f"deltas_{kind}", marks=pytest.mark.slow) for kind in ("tied", "dense", "moe"))],
)
def test_engines_that_get_what_changed_hold_the_bits_of_a_whole_publish(result_of, name):
    """Every publish compares fingerprints too. Meanwhile one engine is away and comes back with nothing, a file is
    damaged after the trainer wrote it and before it writes the next, and a reply is lost."""
    result = result_of(name)
    assert result["unlike"] == []
    published = result["published"]
    whole = [p.version for p in published if p.changed_share is None]
    if name == "deltas_short":
        assert whole == [0]
    else:
        assert whole == [0, FULL_EVERY, DAMAGED_FILE, DAMAGED_BASE, 2 * FULL_EVERY, 3 * FULL_EVERY]
        assert [p.version for p in published if p.unconfirmed] == [RESTARTED, RESTARTED + 1, RESTARTED + 2, LOST_REPLY]
        assert max(result["kept"]) <= FULL_EVERY + 2
        assert result["kept"][2 * FULL_EVERY + 1] < 5
    for p in published:
        if p.version in whole:
            assert p.nbytes >= result["size"]
        else:
            assert 0.003 < p.changed_share < 0.02
            assert p.nbytes < result["size"] / 2 - 500


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deltas_fp8", "deltas_fp8_emulated"])
def test_what_changed_of_quantised_weights(result_of, name):
    result = result_of(name)
    assert result["unlike"] == []
    assert all(0 < p.changed_share < 0.5 for p in result["published"][1:])


def test_a_delta_as_large_as_the_model_is_not_sent_and_the_log_says_so(result_of):
    result = result_of("all_changes")
    assert [p.changed_share for p in result["published"]] == [None] * 7
    assert result["deltas"] == []
    assert len(result["told"]) == 2, "tried once for every whole publish that was due"
    assert "more than 80% of the model" in result["told"][0]
    assert "the next 2 are whole too (weight_sync.full_every)" in result["told"][0]
