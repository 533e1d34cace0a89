"""benchmarks/end_to_end.py: our side on its smallest cell, and the table. TRL's: tests/integrations."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_on_path(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)


@pytest.mark.slow
def test_our_steps_and_parts(tmp_path):
    from end_to_end_sides import run_ours
    from end_to_end_task import CELLS, make_model_and_prompts

    cell = CELLS["tiny-4"]
    make_model_and_prompts(cell, tmp_path)
    prompts = (tmp_path / "prompts.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "heldout.jsonl").write_text("".join(prompts[:8]))
    (tmp_path / "prompts.jsonl").write_text("".join(prompts[8:]))
    run = run_ours(cell, tmp_path, cell.warm + cell.timed, every=1, limit_s=300, threads=1)
    assert len(run.accuracy) == 1 + cell.warm + cell.timed
    assert run.accuracy[0][0] == 0
    assert len(run.counted) == cell.timed
    assert run.startup_s > 0
    for step in run.counted:
        assert 0 < step.response_tokens <= cell.sequences * cell.response
        assert step.parts["forward and backward"] > 0
        assert step.parts["other"] > -0.05, "no part is counted twice"


def test_a_ratio_is_the_median_of_rounds_and_held_against_its_limit():
    from end_to_end import Compared, row
    from end_to_end_sides import SideRun, Step
    from end_to_end_task import CELLS

    def side(*seconds: float) -> SideRun:
        return SideRun(1.0, [Step(s, {"sample": s}, 100.0) for s in seconds], warm=1)

    compared = Compared(CELLS["20M-64"])
    for ours, trl in ((1.0, 2.0), (1.0, 1.0), (3.0, 4.0)):  # behind a first step that does not count
        compared.ours.append(side(100.0, ours))
        compared.trl.append(side(100.0, trl))
    assert compared.ratios == [0.5, 1.0, 0.75]
    assert compared.limit == 0.67
    assert "0.75 0.50 to 1.00   0.67" in row(compared)
    assert Compared(CELLS["quickstart"]).limit == 1.0
    assert Compared(CELLS["1M-64"]).limit is None


def test_every_size_has_as_many_parameters_as_its_name_states():
    from end_to_end_task import CELLS, SIZES, model_config

    sizes = {cell.size: model_config(cell) for cell in CELLS.values() if cell.size in SIZES}
    for name, millions in (("1M", 1), ("20M", 20), ("120M", 120)):
        m = sizes[name]
        heads, groups = m["num_attention_heads"] * m["head_dim"], m["num_key_value_heads"] * m["head_dim"]
        layer = m["hidden_size"] * (2 * heads + 2 * groups + 3 * m["intermediate_size"])
        parameters = 2 * m["vocab_size"] * m["hidden_size"] + m["num_hidden_layers"] * layer
        assert parameters == pytest.approx(1e6 * millions, rel=0.06)
