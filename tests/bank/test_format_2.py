"""Format 2 returns turns, branches and masks unchanged, reads single samples, and is deterministic."""

import dataclasses
import errno
import json
import os

import numpy as np
import pytest
from safetensors.numpy import load as load_tensors

from dppo_megatron.bank import BankCorruption, BankReader, BankWriter, files
from dppo_megatron.bank.blob import decode_front
from dppo_megatron.bank.files import segment_paths
from dppo_megatron.types import ENVIRONMENT, INHERITED, PARTS, POLICY, Rollout, RolloutGroup
from tests.support.bank import assert_same_array, assert_same_group, flip, make_group

FIELDS = [f.name for f in dataclasses.fields(Rollout)]
K = 3


def branched_group(position: int, *, topk: int = K, sampling_mask: bool = True, experts: int = 8) -> RolloutGroup:
    """Two trajectories: the first of two branches, both of several turns; masks, lists and routes."""
    rng = np.random.default_rng(position)
    base = make_group(position)
    spans = [
        [[POLICY, 4, 0], [ENVIRONMENT, 3, 0], [POLICY, 2, 1]],
        [[INHERITED, 4, 0], [ENVIRONMENT, 5, 0], [POLICY, 1, 1], [ENVIRONMENT, 2, 1], [POLICY, 3, 2]],
        [[POLICY, 6, 0]],
    ]
    rollouts = tuple(_branch(rng, np.array(s, np.int32), t, topk, sampling_mask, experts)
                     for s, t in zip(spans, (0, 0, 1), strict=True))  # fmt: skip
    return RolloutGroup(
        base.prompt,
        rollouts,
        np.array([0.25, 0.25, 1.0], np.float32),
        np.array([False, False, True]) & (position % 2 == 0),
        temperature=0.75,
        turn_rewards=(np.array([0.1, 0.2, 0.3], np.float32), np.array([1.0], np.float32)),
    )


def _branch(rng, spans, trajectory, topk, mask, experts) -> Rollout:
    size, sampled = int(spans[:, 1].sum()), int(spans[spans[:, 0] == POLICY, 1].sum())
    tokens = rng.integers(0, 1000, size).astype(np.int32)
    own = tokens[np.repeat(spans[:, 0] == POLICY, spans[:, 1])]
    counts = rng.integers(1, 5, sampled).astype(np.int32)
    ids = [np.append(rng.integers(1000, 2000, n - 1), token) for n, token in zip(counts, own, strict=True)]
    routed = rng.random((5 + size - 1, 3, max(experts, 2))).argsort(axis=2)[..., :2]
    return Rollout(
        tokens,
        -rng.exponential(size=sampled).astype(np.float32),
        np.full(sampled, 3, np.int32),
        "stop",
        topk_ids=rng.integers(0, 1000, (sampled, topk)).astype(np.int32) if topk else None,
        rollout_topk_logprob=-rng.exponential(size=(sampled, topk)).astype(np.float32) if topk else None,
        routed_experts=np.ascontiguousarray(routed.astype(np.uint16 if experts > 256 else np.uint8))
        if experts
        else None,
        spans=spans,
        sampling_mask_ids=np.concatenate(ids).astype(np.int32) if mask else None,
        sampling_mask_counts=counts if mask else None,
        trajectory=trajectory,
    )


def written(directory, *groups):
    with BankWriter(directory, len(groups)) as writer:
        for group in groups:
            writer.append(group)
    reader = BankReader(directory)
    return reader, reader.entries(0, reader.refresh())


def plain(group: RolloutGroup) -> RolloutGroup:
    """A single span of the policy equals no spans."""
    rollouts = [
        dataclasses.replace(r, spans=None) if r.spans is not None and len(r.spans) == 1 else r for r in group.rollouts
    ]
    return dataclasses.replace(group, rollouts=tuple(rollouts))


def assert_same_everything(found: RolloutGroup, expected: RolloutGroup) -> None:
    assert_same_group(found, expected)
    for a, b in zip(found.rollouts, plain(expected).rollouts, strict=True):
        for name in ("spans", "sampling_mask_ids", "sampling_mask_counts"):
            assert_same_array(getattr(a, name), getattr(b, name))
        assert a.trajectory == b.trajectory
    assert (found.turn_rewards is None) == (expected.turn_rewards is None)
    for a, b in zip(found.turn_rewards or (), expected.turn_rewards or (), strict=True):
        assert_same_array(a, b)


@pytest.mark.parametrize(
    "settings", [{}, {"topk": 0}, {"sampling_mask": False}, {"experts": 0}, {"experts": 256}, {"experts": 300}]
)
def test_turns_branches_and_masks_return_unchanged(tmp_path, settings):
    """Also next to a group without lists and routes, in the order in which they were written."""
    group, other = branched_group(4, **settings), make_group(0)
    reader, (entry, plain_entry) = written(tmp_path, group, other)
    assert_same_everything(reader.read(entry), group)
    assert_same_everything(reader.read(plain_entry), other)
    assert [e.routing for e in (entry, plain_entry)] == [(3, 2) if settings.get("experts", 8) else None, None]
    assert entry.spans.tolist() == [[6, 3, 0], [4, 7, 4], [6, 0, 0]]
    assert entry.trajectory == (0, 0, 1)
    assert entry.has_sampling_mask == settings.get("sampling_mask", True)
    assert entry.response_lengths.tolist() == [9, 15, 6]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"spans": np.array([[POLICY, 8, 0]], np.int32)}, "at least 1 each and 9 together"),
        ({"spans": np.array([[POLICY, 9, 0]], np.int64)}, "spans: expected numpy int32"),
        ({"spans": np.array([[3, 9, 0]], np.int32)}, r"origins \[3\] and turns \[0\]"),
        ({"spans": np.array([[POLICY, 6, 1], [ENVIRONMENT, 3, 0]], np.int32)}, "turns from 0 that do not decrease"),
        ({"spans": None}, "rollout_logprob: expected numpy float32"),
        ({"sampling_mask_ids": None}, "sampling_mask_ids and sampling_mask_counts"),
        (
            {"sampling_mask_counts": np.zeros(6, np.int32), "sampling_mask_ids": np.zeros(0, np.int32)},
            "not among the sampling_mask_ids",
        ),
        ({"trajectory": None}, "expected a number for each sample, or None for each"),
        ({"trajectory": 1}, "trajectories"),
    ],
)
def test_turns_that_contradict_themselves_are_refused(tmp_path, change, says):
    group = branched_group(4)
    first = dataclasses.replace(group.rollouts[0], **change)
    with BankWriter(tmp_path, 2) as writer:
        with pytest.raises(ValueError, match=says):
            writer.append(dataclasses.replace(group, rollouts=(first, *group.rollouts[1:])))
        with pytest.raises(ValueError, match="sample 0: the first branch of a trajectory cannot have inherited tokens"):
            writer.append(dataclasses.replace(group, rollouts=tuple(group.rollouts[i] for i in (1, 0, 2))))
        with pytest.raises(ValueError, match="expected equal rewards for all branches of a trajectory"):
            writer.append(dataclasses.replace(group, rewards=np.array([0, 1, 1], np.float32)))
        with pytest.raises(ValueError, match="turn_rewards of 1 trajectories, the samples belong to 2"):
            writer.append(dataclasses.replace(group, turn_rewards=group.turn_rewards[:1]))
        writer.append(group)


def test_the_blob_is_a_safetensors_file_and_equal_groups_are_equal_bytes(tmp_path):
    group = branched_group(4)
    for name in ("a", "b"):
        written(tmp_path / name, group)
    blob = (tmp_path / "a" / "segment-000000.bin").read_bytes()
    assert blob == (tmp_path / "b" / "segment-000000.bin").read_bytes()
    tensors = load_tensors(blob)
    assert_same_array(tensors["prompt.ids"], group.prompt.token_ids)
    assert_same_array(tensors["s1.kept_ids"], group.rollouts[1].sampling_mask_ids)
    assert_same_array(tensors["s2.routed_experts"], group.rollouts[2].routed_experts)
    header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
    metadata = header.pop("__metadata__")
    assert list(metadata) == sorted(metadata)
    begins = [tensor["data_offsets"][0] for tensor in header.values()]
    assert begins == sorted(begins)


class Disk:
    """Counts the bytes that are read from .bin files, and where."""

    def __init__(self, monkeypatch):
        self.bytes = 0
        self.ranges: list[tuple[int, int]] = []
        real = os.preadv

        def preadv(descriptor, buffers, offset):
            count = real(descriptor, buffers, offset)
            assert os.readlink(f"/proc/self/fd/{descriptor}").endswith(".bin")
            self.bytes += count
            self.ranges.append((offset, offset + count))
            return count

        monkeypatch.setattr(os, "preadv", preadv)


def places(ranges: list[tuple[int, int]]) -> list[int]:
    return sorted(place for begin, end in ranges for place in range(begin, end))


def test_a_hint_that_cannot_be_given_is_left_out(tmp_path, monkeypatch):
    """The reader reports a damaged file; some platforms have no such hints."""
    reader, (entry,) = written(tmp_path, branched_group(4))
    monkeypatch.setattr(os, "posix_fadvise", refuse)
    assert reader.prefetch([(entry, [0])]) > 0
    monkeypatch.delattr(os, "posix_fadvise")
    assert reader.prefetch([(entry, [0])]) > 0
    segment_paths(tmp_path, 0)[0].unlink()
    assert reader.prefetch([(entry, [0])]) > 0
    with pytest.raises(BankCorruption, match="the file is gone"):
        reader.read(entry, [0])


def refuse(*_arguments) -> None:
    raise OSError(errno.EINVAL, "not here")


@pytest.mark.parametrize("parts", [("core",), ("core", "topk"), ("core", "routes"), ("core", "sampling_mask"), PARTS])
def test_only_the_requested_samples_and_parts_are_read(tmp_path, monkeypatch, parts):
    group = branched_group(4)
    reader, (entry,) = written(tmp_path, group)
    disk = Disk(monkeypatch)
    found = reader.read(entry, [2, 0], parts)
    wanted = [PARTS.index(part) for part in parts]
    assert disk.bytes == entry.front[0] + entry.parts[[2, 0]][:, wanted].sum()
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(files, "_HINT_BYTES", 64)  # of a longer hint Linux takes the beginning alone
    monkeypatch.setattr(os, "posix_fadvise", lambda file, at, size, advice: told.append((at, at + size)))
    assert reader.prefetch([(entry, [2, 0])], parts) == disk.bytes
    assert max(end - begin for begin, end in told) == 64
    assert places(told) == places(disk.ranges)
    absent = {
        name
        for part, names in {
            "topk": ("topk_ids", "rollout_topk_logprob"),
            "sampling_mask": ("sampling_mask_ids", "sampling_mask_counts"),
            "routes": ("routed_experts",),
        }.items()
        if part not in parts
        for name in names
    }
    expected = plain(group)
    for rollout, source in zip(found.rollouts, (expected.rollouts[2], expected.rollouts[0]), strict=True):
        for name in FIELDS:
            value = None if name in absent else getattr(source, name)
            if isinstance(value, np.ndarray):
                assert_same_array(getattr(rollout, name), value)
            else:
                assert getattr(rollout, name) == value
    assert found.rewards.tolist() == group.rewards[[2, 0]].tolist()


def test_damage_in_a_part_is_named_and_leaves_the_others_readable(tmp_path):
    group = branched_group(4)
    reader, (entry,) = written(tmp_path, group)
    # The first byte of sample 1's top-K.
    flip(tmp_path / "segment-000000.bin", entry.front[0] + entry.parts[:1].sum() + entry.parts[1, 0])
    with pytest.raises(BankCorruption, match=r"segment-000000\.bin: group 0 \(line 2 .*sample 1, part topk: the bytes"):
        reader.read(entry)
    assert reader.read(entry, [1], ("core",)).rollouts[0].versions.tolist() == [3] * 4
    assert_same_array(reader.read(entry, [0]).rollouts[0].topk_ids, group.rollouts[0].topk_ids)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rewards": np.array([1, 0, 0, 0], np.float32)}, "differ in rewards"),
        ({"temperature": 0.5}, "differ in temperature"),
        ({"position": 9}, "differ in position"),
        ({"truncated": np.ones(4, bool)}, "differ in truncated"),
        ({"reward_failed": np.ones(4, bool)}, "differ in reward_failed"),
        ({"max_version": 2, "min_version": 2}, "versions 3 to 3, the index line has 2 to 2"),
        ({"version_sum": 7}, "versions sum to"),
    ],
)
def test_a_line_that_contradicts_its_blob_is_refused(tmp_path, change, says):
    """The line's own crc32 is right."""
    reader, (entry,) = written(tmp_path, make_group(1, topk=2))
    with pytest.raises(BankCorruption, match=says):
        reader.read(dataclasses.replace(entry, **change))


def test_a_line_with_other_lengths_than_its_blob_is_refused(tmp_path):
    reader, (entry,) = written(tmp_path, make_group(1, topk=2))
    shapes = dataclasses.replace(entry.shapes, tokens=entry.shapes.tokens[::-1])
    with pytest.raises(BankCorruption, match="differ in tensors"):
        reader.read(dataclasses.replace(entry, shapes=shapes))


def test_a_header_in_another_spelling_is_compared_as_well(tmp_path):
    """A table that differs is rejected in both spellings."""
    group = make_group(1, topk=2)
    _, (entry,) = written(tmp_path, group)
    front = (tmp_path / "segment-000000.bin").read_bytes()[: entry.front[0]]
    size = int.from_bytes(front[:8], "little")
    header = json.loads(front[8 : 8 + size])

    def decoded(table, **spelling):
        text = json.dumps(table, **spelling).encode()
        return decode_front(len(text).to_bytes(8, "little") + text + front[8 + size :], entry)

    prompt, _ = decoded(header)
    assert prompt.text == group.prompt.text
    shorter = header | {"s1.ids": header["s1.ids"] | {"shape": [1]}}
    for spelling in ({}, {"separators": (",", ":")}):
        with pytest.raises(ValueError, match="differ in tensors"):
            decoded(shorter, **spelling)
