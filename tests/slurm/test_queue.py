"""Commands that change a job, against a scontrol of the test's."""

from __future__ import annotations

import pytest

from dppo_megatron.slurm import queue


@pytest.mark.parametrize(("before", "after"), [("(null)", "n3,n4"), ("n[1-2]", "n3,n4,n[1-2]")])
def test_nodes_are_excluded_in_addition_to_those_before(before, after, tmp_path, monkeypatch):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\necho "JobId=7 ExcNodeList={before} Requeue=1"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    queue.exclude("7+1", ["n3", "n4"])
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == ["show job --oneliner 7+1", f"update JobId=7+1 ExcNodeList={after}"]
