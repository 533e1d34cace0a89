"""A study of one method and two seeds on the quickstart's task, both runs on one engine."""

import json
import shutil
from pathlib import Path

import pytest

from tests.support.runs import config_tree, run, write_config


def rows(out: Path) -> list[dict]:
    found = [json.loads(path.read_text()) for path in sorted((out / "rows").iterdir())]
    return [{name: value for name, value in row.items() if name != "seconds"} for row in found]


@pytest.mark.slow
def test_a_run_that_is_repeated_gives_the_same_row(task, tmp_path):
    tree = config_tree(task, tmp_path / "of-the-base")
    tree["parallel"] = {"world_size": 1, "timeout_s": 120}
    write_config(tree, tmp_path / "base.yaml")
    study = {
        "base": str(tmp_path / "base.yaml"),
        "settings": {"train.steps": 2, "checkpoint.every": 0, "tracking.tensorboard": False},
        "methods": {"dppo": {}},
        "seeds": [1, 2],
    }
    path, out = write_config(study, tmp_path / "study.yaml"), tmp_path / "out"
    said = run("study", path, "--out", out).stdout
    assert "2 runs share 1 engine" in said
    first = rows(out)
    assert [row["status"] for row in first] == ["done", "done"], first
    assert first[0]["steps"] == 2
    assert "0 to do" in run("study", path, "--out", out).stdout

    (out / "rows" / "dppo--base--seed-2.json").unlink()  # it is run again, with an engine of its own
    shutil.rmtree(out / "runs" / "dppo" / "base" / "seed-2")
    run("study", path, "--out", out)
    assert rows(out) == first
