"""Finished turns are not sampled again after a death: they come from memory or from the journal."""

import asyncio
import time

import numpy as np
import pytest

from dppo_megatron.bank.journal import Journal, Journals
from tests.rollout.environments.test_episodes import Killed, play, text_of

SAID = ["ab", "cd", "ef"]
WHOLE = "ab<eos>[ab]cd<eos>[cd]ef<eos>"


def turns_of(requests) -> list[str]:
    return sorted(request.request_id.removeprefix("group-") for request in requests)


def equal(a, b) -> bool:
    names = ("token_ids", "rollout_logprob", "versions", "topk_ids", "rollout_topk_logprob", "spans")
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names)


@pytest.mark.slow
def test_a_group_goes_on_behind_its_last_turns(tokenizer, tmp_path):
    settings = {"settings": {"turns": 3}}
    (whole,), _, _ = play(tokenizer, "Echo", SAID, **settings)
    with pytest.raises(Killed):
        play(tokenizer, "Echo", SAID, killed_at=2, journals=tmp_path / "j", **settings)
    found = Journals(tmp_path / "j", ())
    assert found.oldest_version(0) == 0
    assert found.oldest_version(1) is None
    # Now the policy would answer otherwise, but the earlier turns stay.
    (group,), metrics, requests = play(tokenizer, "Echo", ["no", "no", "ef"], journals=tmp_path / "j", **settings)
    assert turns_of(requests) == ["0.0.2-0", "0.1.2-0"]
    assert metrics["environment/replayed_turns"] == 4
    assert all(map(equal, group.rollouts, whole.rollouts))
    assert [r.tolist() for r in group.turn_rewards] == [[1, 2, 3]] * 2
    # A group that was finished, but not stored, is sampled no more; one that is stored leaves nothing.
    _, _, requests = play(tokenizer, "Echo", ["no"], journals=tmp_path / "j", **settings)
    assert requests == []
    Journals(tmp_path / "j", {0})
    assert list((tmp_path / "j").iterdir()) == []


@pytest.mark.slow
def test_an_environment_that_does_not_repeat_itself_is_dropped_and_counted(tokenizer, tmp_path):
    settings = {"settings": {"turns": 3}, "journals": tmp_path / "j"}
    with pytest.raises(Killed):
        play(tokenizer, "Moody", SAID, killed_at=2, **settings)
    (group,), metrics, requests = play(tokenizer, "Moody", SAID, **settings)
    assert requests == []
    assert metrics["environment/failed_replay"] == 2
    assert group.reward_failed.all()
    assert [r.finish_reason for r in group.rollouts] == ["abort"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_environment_that_dies_is_replayed_to_its_last_turn(tokenizer, tmp_path, at):
    settings = {"directory": str(tmp_path / "died"), "turns": 3, "at": at}
    (group,), metrics, requests = play(tokenizer, "DiesOnce", SAID, samples=1, settings=settings)
    assert text_of(tokenizer, group) == WHOLE
    assert turns_of(requests) == [f"0.0.{turn}-0" for turn in range(3)]
    assert metrics["environment/replayed_turns"] == at + 1
    assert not group.reward_failed.any()
    assert not any(name.startswith("environment/failed") for name in metrics)


def test_a_journal_that_is_opened_while_its_group_is_given_up_is_removed(tmp_path, monkeypatch):
    began = []

    class Slow(Journal):
        def __init__(self, *arguments):
            began.append(True)
            time.sleep(0.05)
            super().__init__(*arguments)

    monkeypatch.setattr("dppo_megatron.bank.journal.Journal", Slow)

    async def give_up() -> None:
        journals = Journals(tmp_path / "j", ())
        opening = asyncio.create_task(journals.turns(3, 1, 1.0))
        while not began:
            await asyncio.sleep(0.001)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        journals.remove(3)
        journals.close()

    asyncio.run(give_up())
    assert list((tmp_path / "j").iterdir()) == []
