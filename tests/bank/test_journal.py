"""The journal of a group: every record that is whole comes back bit for bit, the rest is cut."""

import numpy as np
import pytest

from dppo_megatron.bank.errors import BankWriteError
from dppo_megatron.bank.files import segment_paths
from dppo_megatron.bank.journal import FinishedTurns, Journal
from dppo_megatron.types import Rollout

FIELDS = (
    "token_ids", "rollout_logprob", "versions", "topk_ids", "rollout_topk_logprob", "routed_experts",
    "sampling_mask_ids", "sampling_mask_counts",
)  # fmt: skip


def turn(behind: int, seed: int) -> tuple[np.ndarray, Rollout]:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 5))
    ids = rng.integers(0, 50, size).astype(np.int32)
    lists = rng.integers(0, 50, (size, 3)).astype(np.int32)
    return rng.integers(0, 50, behind).astype(np.int32), Rollout(
        ids, -rng.random(size, np.float32), np.full(size, seed, np.int32), "stop", lists, -lists.astype(np.float32),
        rng.integers(0, 9, (behind + size - 1, 2, 1)).astype(np.uint8), None, ids, np.ones(size, np.int32),
    )  # fmt: skip


@pytest.fixture
def written(tmp_path):
    turns = [turn(3 + i, i) for i in range(3)]
    journal = Journal(tmp_path, 7)
    for number, (behind, sampled) in enumerate(turns):
        journal.add(number % 2, behind, sampled, 0.5)
    return turns


def check(directory, turns, count: int) -> Journal:
    journal = Journal(directory, 7)
    assert [group.rollouts[0].trajectory for group in journal.turns] == [0, 1, 0][:count]
    for (behind, sampled), group in zip(turns[:count], journal.turns, strict=True):
        assert np.array_equal(group.prompt.token_ids, behind)
        assert (group.prompt.position, group.temperature) == (7, 0.5)
        assert group.rollouts[0].finish_reason == "stop"
        for name in FIELDS:
            assert np.array_equal(getattr(group.rollouts[0], name), getattr(sampled, name)), name
    return journal


def test_a_journal_returns_the_turns_that_were_written(tmp_path, written):
    journal = check(tmp_path, written, 3)
    journal.add(1, *turn(9, 9), 0.5)
    assert len(Journal(tmp_path, 7).turns) == 4
    journal.remove()
    journal.remove()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(BankWriteError):
        journal.add(1, *turn(9, 9), 0.5)


def test_an_incomplete_record_is_cut_and_written_again(tmp_path, written, caplog):
    data, index = segment_paths(tmp_path, 7)
    whole = {path: path.read_bytes() for path in (data, index)}
    ends = np.cumsum([len(line) + 1 for line in whole[index].split(b"\n")[:-1]])
    for size in (*range(0, ends[-1], 97), ends[0], ends[0] + 1, ends[1] - 1):
        index.write_bytes(whole[index][:size])
        data.write_bytes(whole[data])
        count = int((ends <= size).sum())
        check(tmp_path, written, count).add(count % 2, *written[count], 0.5)
        check(tmp_path, written, count + 1)
    for place in range(0, len(whole[data]), 31):  # no byte of a record may be believed that is another one
        index.write_bytes(whole[index])
        damaged = bytearray(whole[data])
        damaged[place] ^= 1
        data.write_bytes(damaged)
        found = len(Journal(tmp_path, 7).turns)
        assert found < 3
        check(tmp_path, written, found)
    assert "the next one is incomplete" in caplog.text


def test_a_turn_is_taken_only_after_the_tokens_that_it_was_sampled_after():
    (behind, sampled), (others, _) = turn(3, 0), turn(3, 1)
    finished = FinishedTurns([(behind, sampled)])
    assert finished.take(others) is None
    assert finished.take(behind) is sampled
