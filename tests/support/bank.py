"""Makes groups to fill a bank. A group depends only on its position, so a reader can check it."""

import json

import numpy as np

from dppo_megatron.bank import BankReader, BankWriter
from dppo_megatron.types import Prompt, Rollout, RolloutGroup

PROMPT = 5


def make_group(
    position: int, *, samples: int = 4, shortest: int = 1, longest: int = 12, topk: int = 0, version: int = 3,
    experts: int = 0,
) -> RolloutGroup:  # fmt: skip
    """Make the group of a position. With `experts`, 3 layers route each token to 2 of `experts` experts."""
    rng = np.random.default_rng(position)
    rollouts = []
    for _ in range(samples):
        size = int(rng.integers(shortest, longest + 1))
        rollouts.append(
            Rollout(
                token_ids=rng.integers(0, 1000, size).astype(np.int32),
                rollout_logprob=-rng.exponential(size=size).astype(np.float32),
                versions=np.full(size, version, dtype=np.int32),
                finish_reason="length" if size == longest else "stop",
                topk_ids=rng.integers(0, 1000, (size, topk)).astype(np.int32) if topk else None,
                rollout_topk_logprob=-rng.exponential(size=(size, topk)).astype(np.float32) if topk else None,
                routed_experts=_routing(rng, PROMPT + size - 1, experts) if experts else None,
            )
        )
    prompt = Prompt(position, position % 7, rng.integers(0, 1000, PROMPT).astype(np.int32), f"text {position}", "42")
    rewards = rng.random(samples).astype(np.float32)
    failed = np.zeros(samples, dtype=bool)
    failed[0] = position % 5 == 0
    return RolloutGroup(prompt, tuple(rollouts), rewards * ~failed, failed, temperature=0.75)


def append(writer, positions):
    for position in positions:
        writer.append(make_group(position))


def fill(directory, count, start=0):
    with BankWriter(directory, 3) as writer:
        append(writer, range(start, start + count))


def read_all(directory):
    reader = BankReader(directory)
    return [reader.read(entry) for entry in reader.entries(0, reader.refresh())]


def whole_groups(directory) -> int:
    """Return how many groups the bank has. The groups must have the positions 0, 1, ..."""
    groups = read_all(directory)
    for position, group in enumerate(groups):
        assert_same_group(group, make_group(position))
    return len(groups)


def files(directory, number):
    return directory / f"segment-{number:06d}.bin", directory / f"segment-{number:06d}.jsonl"


def flip(path, at, by=1):
    """Change one byte in a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= by
    path.write_bytes(content)


def as_killed(directory):
    """Make a closed bank look as if the writer had been killed before it recorded the end."""
    head = directory / "head.json"
    fields = json.loads(head.read_text())
    fields.pop("closed")
    head.write_text(json.dumps(fields))


def _routing(rng: np.random.Generator, tokens: int, experts: int) -> np.ndarray:
    chosen = rng.random((tokens, 3, experts)).argsort(axis=2)[..., :2]
    return np.ascontiguousarray(chosen.astype(np.uint8 if experts <= 256 else np.uint16))


def assert_same_group(found: RolloutGroup, expected: RolloutGroup) -> None:
    for name in ("position", "row", "text", "answer"):
        assert getattr(found.prompt, name) == getattr(expected.prompt, name)
    assert found.temperature == expected.temperature
    assert_same_array(found.prompt.token_ids, expected.prompt.token_ids)
    assert_same_array(found.rewards, expected.rewards)
    assert_same_array(found.reward_failed, expected.reward_failed)
    assert len(found.rollouts) == len(expected.rollouts)
    for a, b in zip(found.rollouts, expected.rollouts, strict=True):
        assert a.finish_reason == b.finish_reason
        assert_same_array(a.token_ids, b.token_ids)
        assert a.columns.keys() == b.columns.keys()
        for name, array in b.columns.items():
            assert_same_array(a.column(name), array)


def assert_same_array(found: np.ndarray | None, expected: np.ndarray | None) -> None:
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)
