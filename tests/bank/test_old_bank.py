"""A bank that began in format 1 is read, continued in format 1, and refused where it is damaged."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from dppo_megatron.bank import BankCorruption, BankReader, BankWriter
from tests.support.bank import assert_same_group, make_group, write_format_1

STORED = Path(__file__).parents[1] / "data" / "run_before" / "bank"
SETTINGS = [{}, {"topk": 3}, {"topk": 2, "experts": 300}]


def read_all(directory):
    reader = BankReader(directory)
    return [reader.read(entry) for entry in reader.entries(0, reader.refresh())]


@pytest.mark.parametrize("settings", SETTINGS)
def test_it_is_read_and_continued_in_its_own_format(tmp_path, settings):
    groups = [make_group(p, **settings) for p in (3, 0, 5, 1, 7)]
    bank = tmp_path / "bank"
    write_format_1(bank, groups[:3], 2)
    with BankWriter(bank, 2) as writer:
        assert writer.done_positions() == {3, 0, 5}
        assert [writer.append(g) for g in groups[3:]] == [3, 4]
        writer.drop(9, 2, "no_signal")
    assert not (bank / "head.json").exists()
    lines = [json.loads(line) for path in sorted(bank.glob("*.jsonl")) for line in path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["group"] * 5 + ["dropped"]
    assert not any("line" in line or "v" in line for line in lines)
    for found, group in zip(read_all(bank), groups, strict=True):
        assert_same_group(found, group)


def test_what_older_code_wrote_is_continued(tmp_path):
    bank = Path(shutil.copytree(STORED, tmp_path / "bank"))
    before = read_all(bank)
    with BankWriter(bank, 4) as writer:
        assert writer.num_train_groups == 16
        writer.append(make_group(100))
    for found, group in zip(read_all(bank), [*before, make_group(100)], strict=True):
        assert_same_group(found, group)


def test_samples_of_it_are_read_alone(tmp_path):
    group = make_group(2, topk=3)
    write_format_1(tmp_path / "bank", [group], 1)
    reader = BankReader(tmp_path / "bank")
    (entry,) = reader.entries(0, reader.refresh())
    chosen = dataclasses.replace(
        group, rollouts=(group.rollouts[3], group.rollouts[1]), rewards=group.rewards[[3, 1]],
        reward_failed=group.reward_failed[[3, 1]],
    )  # fmt: skip
    assert_same_group(reader.read(entry, [3, 1]), chosen)
    core = tuple(dataclasses.replace(r, topk_ids=None, rollout_topk_logprob=None) for r in chosen.rollouts)
    assert_same_group(reader.read(entry, [3, 1], ("core",)), dataclasses.replace(chosen, rollouts=core))


def test_it_refuses_what_its_format_cannot_hold(tmp_path):
    write_format_1(tmp_path / "bank", [make_group(0)], 2)
    group = make_group(1)
    rollouts = tuple(
        dataclasses.replace(r, kept_ids=r.token_ids, kept_counts=np.ones_like(r.token_ids)) for r in group.rollouts
    )
    with BankWriter(tmp_path / "bank", 2) as writer, pytest.raises(ValueError, match="need a bank of format 2"):
        writer.append(dataclasses.replace(group, rollouts=rollouts))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda lines: [*lines, lines[-1]], r"segment-000001\.jsonl: line 3: its blob begins at byte"),
        (lambda lines: [lines[1], lines[0]], r"segment-000001\.jsonl: line 1: its blob begins at byte"),
        (lambda lines: [], r"segment-000001\.(jsonl: holds no group|bin: \d+ bytes)"),
        (lambda lines: lines[:1], r"segment-000001\.bin: \d+ bytes, the 1 lines of segment-000001\.jsonl stand for"),
        (lambda lines: [lines[0][:40] + b"\n", lines[1]], r"segment-000001\.jsonl: line 1: not readable"),
    ],
)
@pytest.mark.parametrize("last", [False, True])
def test_damage_is_refused_and_loses_nothing(tmp_path, change, says, last):
    bank = tmp_path / "bank"
    write_format_1(bank, [make_group(p) for p in range(4 if last else 6)], 2)
    index = bank / "segment-000001.jsonl"
    index.write_bytes(b"".join(change(index.read_bytes().splitlines(keepends=True))))
    before = {path.name: path.read_bytes() for path in bank.glob("segment-*")}
    shortened = says.endswith("stand for") or "holds no group" in says
    if not (last and shortened):  # a reader cannot tell those from lines that are still to come
        with pytest.raises(BankCorruption, match=says):
            BankReader(bank).refresh()
    if last and says.endswith("stand for"):
        return  # nor can a writer tell one line less from a crash between blob and line
    if last and shortened:
        says = "the index has lost lines"
    with pytest.raises(BankCorruption, match=says):
        BankWriter(bank, 2)
    assert before == {path.name: path.read_bytes() for path in bank.glob("segment-*")}
