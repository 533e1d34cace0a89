"""The batch of a step with samples of several turns and branches."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dppo_megatron.bank import BankReader
from dppo_megatron.train.trainer.step_samples import StepSamples
from tests.support.tiny_task import task_config
from tests.support.turns import with_turns
from tests.train.trainer.test_bank_batches import LONGEST, SAMPLES, batches, write
from tests.train.trainer.test_bank_batches import _group as group_of


def test_a_trajectory_counts_once_however_many_turns_and_branches_it_has(tmp_path):
    group = with_turns(group_of(1, [(5, False, 1.0), (4, False, 0.0), (2, False, 0.0), (6, True, 0.0)]))
    assert [r.trajectory for r in group.rollouts] == [0, 0, 1, 2, 3]
    sampled = [len(r.versions) for r in group.rollouts]
    write(tmp_path, group)
    train = {"updates_per_step": 1, "micro_batch_tokens": 1000}
    batch = batches(tmp_path, train=train, objective={"aggregation": "seq_mean_token_mean"}).read(0)
    (micro,) = batch.updates[0].micro_batches
    owners = [0, 0, 1, 2, 3]
    of_trajectory = np.bincount(owners, weights=sampled)
    starts = micro.cu_seqlens[:-1].long()
    for i, (start, rollout) in enumerate(zip(starts.tolist(), group.rollouts, strict=True)):
        own = slice(start + 1, start + 1 + len(rollout.token_ids))
        spans = [[0, len(rollout.token_ids), 0]] if rollout.spans is None else rollout.spans.tolist()
        policy = torch.tensor([origin == 0 for origin, tokens, _ in spans for _ in range(tokens)])
        assert torch.equal(micro.mask[own], policy)
        assert torch.equal(micro.target_ids[own][policy], torch.from_numpy(rollout.token_ids)[policy].long())
        assert micro.rollout_logprob[own][policy].unique().tolist() == [-1.0]
        assert micro.topk_ids[own][~policy].unique().tolist() in ([], [-1])
        (advantage,), (weight,) = micro.advantage[own][policy].unique(), micro.loss_weight[own][policy].unique()
        assert float(advantage) == pytest.approx(0.75 if owners[i] == 0 else -0.25)  # over four, not over five
        assert float(weight) == pytest.approx(1 / (SAMPLES * of_trajectory[owners[i]]))
    assert int(micro.mask.sum()) == sum(sampled)
    assert batch.metrics["rollout/response_tokens_mean"] == sum(sampled) / SAMPLES
    assert batch.metrics["rollout/branches_mean"] == 5 / 4
    assert batch.metrics["rollout/truncated_share"] == 1 / 4
    assert batch.metrics["rollout/response_tokens_max"] == max(of_trajectory)  # the T of `bound/quadratic`
    assert (batch.updates[0].sequences, batch.updates[0].trajectories) == (5, 4)  # `bound/linear` is of the latter
    assert batch.metrics["rollout/staleness_mean"] == 0


@pytest.mark.parametrize(
    ("ends", "truncated"), [(("length", "stop"), 0), (("stop", "length"), 1), (("stop", "max_turns"), 0)]
)
def test_a_trajectory_has_the_end_of_its_last_branch_and_the_length_of_its_longest(tmp_path, ends, truncated):
    """Trajectory 0 has two branches of 5 tokens after the prompt, so 5 it is for the penalty, not 10."""
    group = with_turns(group_of(1, [(5, False, 1.0), (4, False, 0.0), (2, False, 0.0), (3, False, 0.0)]))
    first = [replace(r, finish_reason=end) for r, end in zip(group.rollouts[:2], ends, strict=True)]
    write(tmp_path, replace(group, rollouts=(*first, *group.rollouts[2:])))
    reader = BankReader(tmp_path / "bank")
    reader.refresh()
    (entry,) = reader.entries(0, 1)
    limits = {"rollout": {"group_size": SAMPLES, "max_response_tokens": LONGEST}, "reward": {"overlong_buffer": 4}}
    samples = StepSamples.from_entries([entry], task_config(tmp_path, **limits, objective={"overlong_filter": True}))
    assert samples.truncated.tolist() == [[bool(truncated), False, False, False]]
    assert (samples.carrying[0] > 0).tolist() == [not truncated, True, True, True]
    assert samples.lengths.tolist() == [[5, 4, 2, 3]]
    assert samples.penalties.tolist() == [[-(length - 2) / 4 for length in (5, 4, 2, 3)]]
