"""Rows of log-probs as the engine core sends them, and vLLM's own container, give the same columns."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from vllm.logprobs import FlatLogprobs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from dppo_megatron.engines.vllm.extension.rows import LogprobRows, columns, keep_rows

STEPS, K = 3, 2


def processor() -> LogprobsProcessor:
    return LogprobsProcessor(
        tokenizer=None,
        logprobs=FlatLogprobs(),
        prompt_logprobs=None,
        cumulative_logprob=0.0,
        num_logprobs=K,
        num_prompt_logprobs=None,
    )


def steps(entries: int) -> list[LogprobsLists]:
    """One position each, as many entries as the neediest request of the batch wants."""
    rng = np.random.default_rng(0)
    shape = (STEPS, 1, entries)
    ids, logprobs = rng.integers(0, 99, shape).astype(np.int32), rng.standard_normal(shape).astype(np.float32)
    return [LogprobsLists(i, p, np.ones(1, np.int32)) for i, p in zip(ids, logprobs, strict=True)]


@pytest.mark.parametrize("entries", [K + 1, K + 5])
def test_rows_are_what_vllm_would_have_kept(entries):
    theirs, ours = processor(), processor()
    state = SimpleNamespace(logprobs_processor=ours)
    keep_rows(state)
    kept = state.logprobs_processor
    for step in steps(entries):
        theirs._update_sample_logprobs(step)
        kept._update_sample_logprobs(step)
    assert isinstance(kept.logprobs, LogprobRows)
    assert len(kept.logprobs) == len(theirs.logprobs) == STEPS
    for found, expected in zip(
        columns([kept.logprobs], [STEPS], K), columns([theirs.logprobs], [STEPS], K), strict=True
    ):
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype


def test_samples_of_a_group_stand_one_behind_the_other():
    theirs, ours, nothing = processor(), LogprobRows(), LogprobRows()
    for step in steps(K + 1):
        theirs._update_sample_logprobs(step)
        ours.parts.append((step.logprob_token_ids, step.logprobs))
    together = columns([ours, nothing, theirs.logprobs], [STEPS, 0, STEPS], K)
    for found, alone in zip(together, columns([ours], [STEPS], K), strict=True):
        np.testing.assert_array_equal(found, np.concatenate((alone, alone)))
    assert columns([nothing], [0], K)[0].shape == (0, K + 1)


def test_a_request_that_has_sampled_stays_as_it_is():
    begun = processor()
    begun._update_sample_logprobs(steps(K + 1)[0])
    state = SimpleNamespace(logprobs_processor=begun)
    keep_rows(state)
    assert state.logprobs_processor is begun
    assert columns([begun.logprobs], [1], K)[0].shape == (1, K + 1)


def test_other_shapes_are_refused():
    rows = LogprobRows()
    rows.parts.append((np.zeros((1, K + 1), np.int32), np.zeros((1, K + 1), np.float32)))
    for held, positions in (([rows], [2]), ([rows, LogprobRows()], [0, 1])):
        with pytest.raises(ValueError, match="expected"):
            columns(held, positions, K)
