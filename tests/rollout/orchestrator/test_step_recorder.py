"""The orchestrator's record of a step."""

import json

from dppo_megatron.rollout.orchestrator.metrics import StepRecorder
from tests.support.bank import make_group


def test_a_record_counts_the_tokens_and_groups_of_its_step(tmp_path, monkeypatch):
    clock = iter((10.0, 14.0))
    monkeypatch.setattr("dppo_megatron.rollout.orchestrator.metrics.time.monotonic", lambda: next(clock))
    recorder = StepRecorder(tmp_path / "records.jsonl", 2, lambda: {"engine/serving": 2.0})
    groups = [make_group(position) for position in range(3)]
    recorder.count_started(0)
    recorder.count_finished(0, groups[0])
    recorder.count_dropped(0, groups[1])
    recorder.count_given_up()
    recorder.count_finished(0, groups[2])
    tokens = sum(len(rollout.token_ids) for group in groups for rollout in group.rollouts)
    assert json.loads((tmp_path / "records.jsonl").read_text()) == {
        "step": 1,
        "time/generate_s": 4.0,
        "rollout/generated_tokens_per_s": tokens / 4,
        "rollout/dropped_groups": 1,
        "rollout/too_stale_groups": 1,
        "rollout/too_stale_share": 1 / 4,
        "engine/serving": 2.0,
    }
