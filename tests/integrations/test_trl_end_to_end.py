"""TRL's side of benchmarks/end_to_end.py on its smallest cell: its times add up, and its files are read."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.integrations


def test_steps_parts_and_a_plain_step(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from end_to_end_sides import run_trl
    from end_to_end_task import CELLS, make_model_and_prompts

    cell = CELLS["tiny-4"]
    make_model_and_prompts(cell, tmp_path)
    prompts = (tmp_path / "prompts.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "heldout.jsonl").write_text("".join(prompts[:8]))
    run = run_trl(cell, tmp_path, Path(sys.executable), cell.warm + cell.timed, every=1, limit_s=300, threads=1)
    assert len(run.accuracy) == 1 + cell.warm + cell.timed
    assert run.accuracy[0][0] == 0
    assert run.accuracy[-1][0] == pytest.approx(sum(step.seconds for step in run.steps))
    assert len(run.counted) == cell.timed
    assert run.startup_s > 0
    assert run.plain_s > 0
    for step in run.counted:
        assert 0 < step.response_tokens <= cell.sequences * cell.response
        assert sum(step.parts.values()) == pytest.approx(step.seconds)
        assert all(seconds > 0 for seconds in step.parts.values()), step.parts
