"""`plan --lengths` predicts a run by simulation, tested on cases computed by hand."""

import dataclasses

import numpy as np
import pytest

from dppo_megatron.run.plan.pace import LengthsError, PaceSettings, predict, read_lengths
from tests.support.bank import fill

SETTINGS = PaceSettings(
    prompts_per_step=2,
    concurrent=2,
    max_staleness=0,
    steps=3,
    tokens_per_s=10,
    bytes_per_token=1,
    store_bytes_per_s=1e9,
    train_s=4,
)


def groups(*lengths: int, count: int = 6) -> list[np.ndarray]:
    return [np.array(lengths)] * count


def test_a_synchronous_step_waits_for_its_longest_response():
    pace = predict(groups(20, 50), SETTINGS)
    assert pace.wait_s == pytest.approx(5)
    assert pace.step_s == pytest.approx(9)
    assert pace.staleness == 0


def test_the_time_that_the_orchestrator_takes_is_added_to_that_of_the_engines():
    """140 bytes a step at 70 bytes a second: the second of two groups that end together is stored 2 s later."""
    pace = predict(groups(20, 50), dataclasses.replace(SETTINGS, store_bytes_per_s=70))
    assert pace.wait_s == pytest.approx(7)


def test_sampling_disappears_behind_training():
    """One version ahead: 5 s of sampling during 4 s of training; only the first step waits in full."""
    pace = predict(groups(50), dataclasses.replace(SETTINGS, max_staleness=1))
    assert pace.wait_s == pytest.approx((5 + 1 + 1) / 3)


def test_tokens_behind_an_update_are_newer():
    """Groups of step 1 are begun at 1 s and end at 2 s; policy 1 comes at 1.5 s: half of their tokens are of it."""
    settings = dataclasses.replace(SETTINGS, steps=2, max_staleness=1, train_s=0.5)
    pace = predict(groups(10, count=4), settings)
    assert pace.staleness == pytest.approx((0 + 0.5) / 2)


def test_more_staleness_and_faster_training_wait_as_they_should():
    rng = np.random.default_rng(0)
    drawn = [np.clip(rng.lognormal(3, 1, 4), 1, 200).astype(int) for _ in range(50)]
    settings = dataclasses.replace(SETTINGS, prompts_per_step=8, concurrent=8, steps=6)
    waits = [predict(drawn, dataclasses.replace(settings, max_staleness=s)).wait_s for s in (0, 1, 2)]
    lags = [predict(drawn, dataclasses.replace(settings, max_staleness=s)).staleness for s in (0, 1, 2)]
    assert waits[0] > waits[1] > 0
    assert lags == sorted(lags)
    assert 0 == lags[0] < lags[2] <= 2


def test_lengths_come_from_a_bank_or_a_file(tmp_path):
    fill(tmp_path / "run" / "bank", 4)
    of_run, of_bank = (read_lengths(tmp_path / "run" / part, 4) for part in ("", "bank"))
    assert [g.tolist() for g in of_run] == [g.tolist() for g in of_bank]
    assert len(of_run) == 4
    (tmp_path / "groups.txt").write_text("3 4\n\n5, 6\n")
    assert [g.tolist() for g in read_lengths(tmp_path / "groups.txt", 2)] == [[3, 4], [5, 6]]
    (tmp_path / "flat.txt").write_text("1\n2\n3\n4\n5\n")
    assert [g.tolist() for g in read_lengths(tmp_path / "flat.txt", 2)] == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("3\nfour\n", "line 2: 'four': expected tokens"),
        ("3 0\n", "line 1: '3 0': expected tokens"),
        ("", "fewer than the 2 lengths of a group"),
    ],
)
def test_a_file_without_lengths_is_refused(tmp_path, text, says):
    (tmp_path / "lengths").write_text(text)
    with pytest.raises(LengthsError, match=says):
        read_lengths(tmp_path / "lengths", 2)
    with pytest.raises(LengthsError, match="cannot be read"):
        read_lengths(tmp_path / "gone", 2)
