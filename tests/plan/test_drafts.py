"""`plan --speculation` decodes stored samples again, tested on cases computed by hand."""

from dataclasses import replace

import numpy as np
import pytest

from dppo_megatron.bank import BankReader, BankWriter, EarlierSamples
from dppo_megatron.plan import drafts
from tests.support.bank import make_group
from tests.support.configs import make_config

PROMPT = np.array([90, 91], np.int32)


def alike(rows):
    """A second for each step, whatever its rows, and none to start a group."""
    return float(rows > 0)


def stored(*samples, earlier=()):
    arrays = [np.array(sample, np.int32) for sample in samples]
    before = [np.concatenate([PROMPT, np.array(sample, np.int32)]) for sample in earlier]
    return drafts.StoredGroup(PROMPT, arrays, before, 1 if earlier else 0)


def seconds(*groups, together=1, running=8, batch=8, most=4, step_s=alike):
    return drafts.decode(
        groups, together=together, running=running, batch=batch, max_drafts=most, step_s=step_s
    ).seconds


def test_without_drafts_a_step_gives_each_running_sample_a_token():
    group = stored(range(5), range(3), range(4))
    assert seconds(group, most=0) == 5
    assert seconds(group, most=0, running=1) == 12
    assert seconds(group, most=0, step_s=float) == 3 + 3 + 3 + 2 + 1
    assert seconds(group, most=0, running=2, step_s=float) == 12  # 2, 2, 2, 2, 2, 1, 1
    assert seconds(group, stored(), group, most=0) == 10  # one group after the other
    assert seconds(group, group, most=0, together=2) == 5
    assert seconds(group, group, most=0, step_s=lambda rows: 1.0 if rows else 20.0) == 2 * 20 + 10


def test_right_drafts_save_steps_and_the_rows_are_paid():
    group = stored(range(10), earlier=[range(10)])
    found = drafts.decode([group], together=1, running=1, batch=1, max_drafts=4, step_s=float)
    assert found.accepted == {(1, 0): [4, 4]}  # 4 + 1, 4 + 1 tokens
    assert (found.seconds, found.drafted) == (10, 8)
    assert seconds(group, batch=0) == 10  # above the batch size of the gate


def test_wrong_drafts_cost_rows_and_stop():
    wrong = [np.arange(100) + 2 * (np.arange(100) % 2) for _ in range(1)]
    group = stored(range(100), earlier=[tokens.tolist() for tokens in wrong])
    found = drafts.decode([group], together=1, running=1, batch=1, max_drafts=4, step_s=alike)
    assert found.seconds == 100 - sum(map(sum, found.accepted.values()))


def test_finished_samples_of_the_group_are_followed():
    assert seconds(stored(range(3), range(3), range(20)), running=1) < 3 + 3 + 20
    assert seconds(stored(range(3), range(50, 53), range(20, 40)), running=1) == 26


def test_times_of_a_step_are_interpolated():
    step_s = drafts.parse_step_times("8:12 1:9 32:24")
    assert [1e3 * step_s(rows) for rows in (1, 8, 20, 40)] == pytest.approx([9, 12, 18, 28])
    assert drafts.parse_step_times("4:10")(9) == 0.01
    assert [drafts.parse_step_times(text)(0) for text in ("4:10", "0:70 4:10")] == [0, 0.07]


@pytest.mark.parametrize("text", ["", "1", "1:x", "0:4", "1:0", "a:b", "-1:4", "0:-1 1:1"])
def test_other_times_are_refused(text):
    with pytest.raises(drafts.DraftsError, match="--step-ms"):
        drafts.parse_step_times(text)


def two_epochs(directory):
    """Two groups of each of two prompts; the later one has the tokens of the earlier one."""
    with BankWriter(directory, 2) as writer:
        for position in range(4):
            group = make_group(position % 2, shortest=20, longest=40)
            writer.append(replace(group, prompt=replace(group.prompt, position=position, row=position % 2)))


def test_a_run_is_read_with_its_earlier_samples(tmp_path):
    two_epochs(tmp_path / "bank")
    groups = drafts.read_groups(tmp_path)
    assert [(group.epoch, len(group.samples), len(group.earlier)) for group in groups] == [(0, 4, 0)] * 2 + [
        (1, 4, 4)
    ] * 2
    for group in groups[2:]:
        for tokens, earlier in zip(group.samples, group.earlier, strict=True):
            np.testing.assert_array_equal(earlier, np.concatenate([group.prompt, tokens]))
    config = make_config(engine={"draft_tokens": 4}, rollout={"prompts_per_step": 2, "group_size": 4})
    lines = "\n".join(drafts.drafts_report(tmp_path, config, "1:10 40:10"))
    assert "4 groups" in lines
    assert "1 earlier   0: " in lines
    plain, drafted = drafts.gain(groups, config, alike, 4)
    assert plain / drafted > 1.3
    assert f"{plain / drafted:.2f} x as fast" in lines
    assert "name the engine's step times" in "\n".join(drafts.drafts_report(tmp_path, config, None))
    with pytest.raises(drafts.DraftsError, match="no bank with groups"):
        drafts.read_groups(tmp_path / "none")


def test_the_bank_gives_the_earlier_samples_of_a_prompt(tmp_path):
    bank = EarlierSamples(BankReader(tmp_path / "bank"))
    group = make_group(0, shortest=20, longest=40)
    prompt = replace(group.prompt, position=9)
    assert bank.samples(prompt) == ()
    two_epochs(tmp_path / "bank")
    found = bank.samples(prompt)
    assert len(found) == 8  # of the two newest groups
    for tokens, rollout in zip(found, group.rollouts * 2, strict=True):
        np.testing.assert_array_equal(tokens, np.concatenate([prompt.token_ids, rollout.token_ids]))
    assert bank.samples(replace(prompt, row=5)) == ()
    assert bank.samples(replace(prompt, token_ids=prompt.token_ids[1:])) == ()  # that row of another file
    (tmp_path / "bank" / "segment-000000.bin").unlink()
    (tmp_path / "bank" / "retain-from-000001").touch()
    assert len(bank.samples(prompt)) == 4  # the other segment was deleted with permission
