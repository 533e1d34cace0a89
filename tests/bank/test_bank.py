"""Groups come out of the bank unchanged, in order, with the right bookkeeping."""

import asyncio
import dataclasses
import json
import os
import threading
import time
from collections import Counter

import numpy as np
import pytest

from dppo_megatron.bank import BankError, BankReader, BankTimeout, BankWriter, EarlierSamples, ledger
from dppo_megatron.bank.files import Head
from tests.support.bank import append, assert_same_group, make_group


def replace_rollout(group, **fields):
    first = dataclasses.replace(group.rollouts[0], **fields)
    return dataclasses.replace(group, rollouts=(first, *group.rollouts[1:]))


def test_entries_describe_groups_without_reading_them(tmp_path):
    group = make_group(10, topk=2)
    with BankWriter(tmp_path, 4) as writer:
        writer.append(group)
    (tmp_path / "segment-000000.bin").unlink()
    reader = BankReader(tmp_path)
    reader.refresh()
    (entry,) = reader.entries(0, 1)
    assert (entry.number, entry.position, entry.row) == (0, 10, 3)
    assert entry.response_lengths.tolist() == [len(r.token_ids) for r in group.rollouts]
    assert entry.response_lengths.dtype == np.int32
    np.testing.assert_array_equal(entry.rewards, group.rewards)
    np.testing.assert_array_equal(entry.reward_failed, group.reward_failed)
    assert entry.rewards.dtype == np.float32
    assert (entry.min_version, entry.max_version, entry.topk, entry.temperature) == (3, 3, 2, 0.75)
    assert sum(entry.finish_reasons.values()) == entry.num_samples == 4
    assert entry.truncated.sum() == entry.finish_reasons.get("length", 0)


def test_responses_may_be_empty(tmp_path):
    group = replace_rollout(
        make_group(0),
        token_ids=np.zeros(0, np.int32),
        rollout_logprob=np.zeros(0, np.float32),
        versions=np.zeros(0, np.int32),
        finish_reason="abort",
    )
    with BankWriter(tmp_path, 1) as writer:
        writer.append(group)
    reader = BankReader(tmp_path)
    reader.refresh()
    assert_same_group(reader.read(reader.entries(0, 1)[0]), group)


def test_a_segment_holds_one_step(tmp_path):
    with BankWriter(tmp_path, 3) as writer:
        for p in range(7):
            writer.append(make_group(p))
            writer.drop(100 + p, 0, "too_long")
    reader = BankReader(tmp_path)
    reader.refresh()
    assert [e.segment for e in reader.entries(0, 7)] == [0, 0, 0, 1, 1, 1, 2]
    assert [e.position for e in reader.entries(2, 5)] == [2, 3, 4]
    assert reader.entries(3, 3) == []
    with pytest.raises(IndexError, match="of 7"):
        reader.entries(5, 8)


def test_the_bank_is_the_prompt_cursor(tmp_path):
    with BankWriter(tmp_path, 2) as writer:
        for p in (3, 0, 5):
            writer.append(make_group(p))
        writer.drop(1, 1, "aborted", "engine gave up")
    with BankWriter(tmp_path, 2) as writer:
        assert writer.done_positions() == {0, 1, 3, 5}
        assert writer.num_train_groups == 3
        with pytest.raises(ValueError, match="position 1 is already"):
            writer.append(make_group(1))
        with pytest.raises(ValueError, match="position 3 is already"):
            writer.drop(3, 0, "again")
        assert writer.append(make_group(2)) == 3
    reader = BankReader(tmp_path)
    reader.refresh()
    assert [e.position for e in reader.entries(0, 4)] == [3, 0, 5, 2]


def test_a_closed_writer_refuses(tmp_path):
    writer = BankWriter(tmp_path, 1)
    writer.close()
    writer.close()
    with pytest.raises(BankError, match="closed"):
        writer.append(make_group(0))


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda g: replace_rollout(g, rollout_logprob=g.rollouts[0].rollout_logprob.astype(np.float16)), "float32"),
        (lambda g: replace_rollout(g, rollout_logprob=g.rollouts[0].rollout_logprob.tolist()), "found list"),
        (
            lambda g: replace_rollout(g, rollout_logprob=g.rollouts[0].rollout_logprob * np.float32("nan")),
            r"rollout_logprob\[0\] = nan: not finite",
        ),
        (lambda g: replace_rollout(g, versions=g.rollouts[0].versions[:-1]), "versions"),
        (lambda g: replace_rollout(g, topk_ids=None), "topk_ids and rollout_topk_logprob must be present"),
        (
            lambda g: replace_rollout(g, rollout_topk_logprob=g.rollouts[0].rollout_topk_logprob[:, :1]),
            "rollout_topk_logprob",
        ),
        (lambda g: replace_rollout(g, finish_reason="eos"), "finish_reason"),
        (lambda g: dataclasses.replace(g, rewards=g.rewards * np.float32("inf")), "rewards"),
        (lambda g: dataclasses.replace(g, reward_failed=g.reward_failed[:-1]), "reward_failed"),
        (lambda g: dataclasses.replace(g, rollouts=()), "no rollouts"),
        (lambda g: dataclasses.replace(g, temperature=0.0), "temperature"),
        (lambda g: replace_rollout(g, routed_experts=None), "in all samples or in none"),
        (lambda g: replace_rollout(g, routed_experts=g.rollouts[0].routed_experts[1:]), "routed_experts: expected"),
        (lambda g: replace_rollout(g, routed_experts=g.rollouts[0].routed_experts[:, 1:]), "routed_experts"),
        (lambda g: replace_rollout(g, routed_experts=g.rollouts[0].routed_experts.astype(np.int64)), "uint8"),
        (lambda g: replace_rollout(g, routed_experts=g.rollouts[0].routed_experts * 0), "the same expert twice"),
    ],
)
def test_malformed_groups_are_refused_and_leave_no_trace(tmp_path, corrupt, message):
    with BankWriter(tmp_path, 2) as writer:
        with pytest.raises(ValueError, match=message):
            writer.append(corrupt(make_group(1, topk=2, experts=8)))
        assert writer.append(make_group(1, topk=2, experts=8)) == 0


@pytest.mark.parametrize(("position", "row"), [(-1, 0), (1, -1)])
def test_a_prompt_that_is_none_is_not_dropped(tmp_path, position, row):
    """Its line could not be read again, and with it none that follows."""
    with BankWriter(tmp_path, 3) as writer:
        with pytest.raises(ValueError, match="count from 0"):
            writer.drop(position, row, "aborted")
        writer.append(make_group(0))
    assert BankReader(tmp_path).refresh() == 1


def test_refresh_counts_every_new_group_once(tmp_path):
    reader = BankReader(tmp_path / "later")
    assert reader.refresh() == 0
    with BankWriter(tmp_path / "later", 2) as writer:
        for p in range(5):
            writer.append(make_group(p))
            assert reader.refresh() == p + 1
            assert reader.refresh() == p + 1
    assert reader.num_groups == 5


def test_a_reader_follows_a_writer(tmp_path):
    total, seen = 60, []

    def write():
        with BankWriter(tmp_path, 7, fsync=False) as writer:
            for p in range(total):
                writer.append(make_group(p, longest=200))
                if p % 3 == 0:
                    writer.drop(1000 + p, 0, "aborted")

    thread = threading.Thread(target=write)
    thread.start()
    reader = BankReader(tmp_path)
    while len(seen) < total:
        count = reader.wait_for(len(seen) + 1, timeout_s=10, poll_s=0.0005)
        seen += [reader.read(entry) for entry in reader.entries(len(seen), count)]
    thread.join()
    for p, group in enumerate(seen):
        assert_same_group(group, make_group(p, longest=200))


def test_a_reader_that_begins_with_the_writer_sees_no_contradiction(tmp_path, monkeypatch):
    """It looked before there was a head, and the writer is a segment further when it looks again."""
    with BankWriter(tmp_path, 1) as writer:
        writer.append(make_group(0))
        read = Head.read
        looks = iter([lambda: None, lambda: writer.append(make_group(1))])

        def late(directory):
            found = next(looks)()
            return None if found is None else read(directory)

        monkeypatch.setattr(Head, "read", late)
        reader = BankReader(tmp_path)
        assert reader.refresh() == 1
        monkeypatch.setattr(Head, "read", read)
        assert reader.refresh() == 2


def test_wait_for_reports_the_number_of_groups_that_arrived(tmp_path):
    with BankWriter(tmp_path, 8) as writer:
        for p in range(3):
            writer.append(make_group(p))
    reader = BankReader(tmp_path)
    assert reader.wait_for(3, timeout_s=0) == 3
    with pytest.raises(BankTimeout, match=r"3 of 5 groups arrived and none for 0\.\d s .*timeout 0\.1 s") as raised:
        reader.wait_for(5, timeout_s=0.1)
    assert isinstance(raised.value, TimeoutError)


def test_arrivals_prolong_the_wait(tmp_path):
    def write():
        with BankWriter(tmp_path, 8, fsync=False) as writer:
            for p in range(5):
                time.sleep(0.1)
                writer.append(make_group(p))

    thread = threading.Thread(target=write)
    thread.start()
    assert BankReader(tmp_path).wait_for(5, timeout_s=0.45) == 5
    thread.join()


def test_index_lines_are_plain_json(tmp_path):
    with BankWriter(tmp_path, 2) as writer:
        writer.append(make_group(0))
        writer.drop(1, 1, "aborted", 'a "quoted"\nline')
    begin, group, dropped = map(json.loads, (tmp_path / "segment-000000.jsonl").read_text().splitlines())
    assert (begin["kind"], begin["v"], begin["segment"]) == ("begin", 2, 0)
    assert (group["kind"], group["position"], group["n"]) == ("group", 0, 4)
    assert (dropped["kind"], dropped["position"], dropped["detail"]) == ("dropped", 1, 'a "quoted"\nline')


def test_an_event_loop_goes_on_while_a_group_is_written(tmp_path, monkeypatch):
    """Two writes of 0.25 s a group do not block the loop."""
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *call: (time.sleep(0.25), real(*call))[1])

    async def main() -> tuple[float, list[int]]:
        longest = 0.0
        with BankWriter(tmp_path, 4) as writer:
            last = time.monotonic()
            writes = [asyncio.wrap_future(writer.begin_append(make_group(p))) for p in range(3)]
            assert (writer.num_train_groups, writer.num_begun_groups) == (0, 3)
            while not all(write.done() for write in writes):
                await asyncio.sleep(0.001)
                longest, last = max(longest, time.monotonic() - last), time.monotonic()
            assert writer.num_train_groups == 3
            return longest, [write.result() for write in writes]

    longest, numbers = asyncio.run(main())
    assert numbers == [0, 1, 2]
    assert longest < 0.24


def test_a_group_that_fails_in_the_writers_thread_leaves_its_position_free(tmp_path):
    broken = dataclasses.replace(make_group(1), temperature=0.0)
    with BankWriter(tmp_path, 4) as writer:
        futures = [writer.begin_append(g) for g in (make_group(0), broken, make_group(2))]
        with pytest.raises(ValueError, match="position 2 is already"):
            writer.begin_append(make_group(2))
        assert futures[0].result() == 0
        with pytest.raises(ValueError, match="temperature"):
            futures[1].result()
        assert futures[2].result() == 1
        assert writer.num_begun_groups == writer.num_train_groups == 2
        assert writer.done_positions() == {0, 2}
        assert writer.append(make_group(1)) == 2


def test_the_bank_gives_the_earlier_samples_of_a_prompt(tmp_path):
    bank = EarlierSamples(BankReader(tmp_path))
    groups = [make_group(row, shortest=20, longest=40) for row in (0, 1)]
    prompt = dataclasses.replace(groups[0].prompt, position=9)
    assert bank.samples(prompt) == ()
    with BankWriter(tmp_path, 2) as writer:
        for position in range(4):  # two groups of each prompt
            group = groups[position % 2]
            writer.append(dataclasses.replace(group, prompt=dataclasses.replace(group.prompt, position=position)))
    found = bank.samples(prompt)
    assert len(found) == 8  # of the two newest groups
    for tokens, rollout in zip(found, groups[0].rollouts * 2, strict=True):
        np.testing.assert_array_equal(tokens, np.concatenate([prompt.token_ids, rollout.token_ids]))
    assert bank.samples(dataclasses.replace(prompt, row=5)) == ()
    assert bank.samples(dataclasses.replace(prompt, token_ids=prompt.token_ids[1:])) == ()  # that row of another file
    (tmp_path / "segment-000000.bin").unlink()
    (tmp_path / "retain-from-000001").touch()
    assert len(bank.samples(prompt)) == 4  # the other segment was deleted with permission


def test_the_writers_reader_has_its_groups_without_reading_the_index(tmp_path, monkeypatch):
    with BankWriter(tmp_path, 3) as writer:
        append(writer, range(7))
    opened = Counter()

    def counting(path, *args, **kwargs):
        opened[os.path.basename(path)] += 1
        return open(path, *args, **kwargs)

    monkeypatch.setattr(ledger, "open", counting, raising=False)
    with BankWriter(tmp_path, 3) as writer:
        reader, earlier = writer.reader(), EarlierSamples(writer.reader())
        append(writer, range(7, 10))
        assert len(earlier.samples(make_group(1).prompt)) == 4
        assert opened == {"segment-000000.jsonl": 1, "segment-000001.jsonl": 1}  # by the writer, before the last one
        other = BankReader(tmp_path)
        assert reader.refresh() == other.refresh() == 10
        assert reader.segments() == other.segments() == [(0, 3), (3, 6), (6, 9), (9, 10)]
        for number, (mine, others) in enumerate(zip(reader.entries(0, 10), other.entries(0, 10), strict=True)):
            assert_same_group(reader.read(mine), other.read(others))
            assert reader.row(number) == mine.row
        assert opened["segment-000003.jsonl"] == 1  # by the other reader
