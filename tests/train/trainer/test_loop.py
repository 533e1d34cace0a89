"""The steps of training, with everything around the loop scripted."""

from types import SimpleNamespace
from unittest.mock import MagicMock, call

import pytest

from dppo_megatron.train.actor import UpdateStats
from dppo_megatron.train.trainer import loop as module
from dppo_megatron.train.trainer.batches import StepBatch, UpdateBatch
from dppo_megatron.train.trainer.metrics import MismatchLimit
from tests.support.configs import make_config
from tests.support.updates import update_stats


@pytest.fixture
def train(tmp_path, monkeypatch):
    """f(publisher, waits, rollout) trains two steps with a mismatch of 0.2; the steps that the method was set to."""
    monkeypatch.setattr(module.Throughput, "from_actor", lambda actor: None)

    def run(publisher=None, waits=(True, True), **rollout) -> list[int]:
        config = make_config(run={"dir": tmp_path}, train={"steps": 2}, rollout=rollout)
        of_steps = []

        def update(micro_batches, method, **_) -> UpdateStats:
            of_steps.append(method.step)
            return update_stats(metrics={"mismatch/kl": 0.2})

        module.Training(
            config=config,
            actor=SimpleNamespace(layout=SimpleNamespace(rank=0), train_update=update),
            objective=SimpleNamespace(
                needs_teacher=True, at_step=lambda step: SimpleNamespace(step=step, needs_statistic=False)
            ),
            source=SimpleNamespace(read=lambda step: StepBatch([UpdateBatch([], 1, 6, 6, 21)], {})),
            policy_logprobs=SimpleNamespace(add=lambda batch, metrics: batch),
            acceptance=SimpleNamespace(begin=lambda: None, settle=lambda batch, step: {}),
            publisher=publisher,
            checkpoints=SimpleNamespace(due=lambda step: False),
            control=MagicMock(**{"wait_until_ready.side_effect": waits}),
            recorder=MagicMock(),
            token_log=MagicMock(),
            step=0,
        ).run()
        return of_steps

    return run


def test_a_schedule_of_the_objective_follows_the_steps(train):
    assert train() == [0, 1]


def test_more_mismatch_than_the_limit_ends_the_run(train):
    train(max_mismatch_kl=0.3)
    with pytest.raises(MismatchLimit, match="step 0: mismatch/kl = "):
        train(max_mismatch_kl=0.1)


def test_an_engine_that_lags_gets_the_policy_again(train):
    publisher = MagicMock(**{"publish.return_value.metrics.return_value": {}})
    train(publisher, waits=(True, False, True))
    assert publisher.publish.call_args_list == [call(0), call(1), call(1), call(2)]
