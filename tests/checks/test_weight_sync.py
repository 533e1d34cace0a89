"""Ways to publish that are not there, each refused with one sentence, and directories that cannot be written to."""

from __future__ import annotations

from pathlib import Path

import pytest

from dppo_megatron.checks import resume, settings_problems
from dppo_megatron.config import Config, ConfigError, read_config
from tests.support.configs import make_config


def config(**sections: dict) -> Config:
    return make_config(model={"path": "unused"}, **sections)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"weight_sync": {"full_every": 5, "transport": "broadcast"}},
            "weight_sync.full_every = 5: a broadcast is of the whole, for ranks and engine workers keep no copy",
        ),
        ({"engine": {"placement": "colocated", "kind": "sglang"}, "rollout": {"max_staleness": 0}}, None),
        (
            {"engine": {"placement": "colocated", "kind": "sglang"}, "weight_sync": {"transport": "broadcast"}},
            "weight_sync.transport = broadcast: NCCL does not connect two processes on one GPU",
        ),
        (
            {"weight_sync": {"directory": "/dev/shm/mine", "transport": "broadcast"}},
            "weight_sync.directory = /dev/shm/mine: a broadcast writes nothing",
        ),
        (
            {"weight_sync": {"directory": "/dev/shm/mine"}, "slurm": {"trainer_nodes": 1, "engine_nodes": 1}},
            "weight_sync.directory = /dev/shm/mine: /dev/shm is each machine's own, and the run is to have 2 nodes",
        ),
        ({"weight_sync": {"directory": "/shared/mine"}, "slurm": {"engine_nodes": 1}}, None),
        ({"weight_sync": {"directory": "/dev/shm/mine", "full_every": 5}}, None),
        ({"weight_sync": {"directory": "/dev/shm/mine"}, "engine": {"placement": "colocated"}}, None),
    ],
)
def test_what_cannot_be_published_so_is_refused(changes, told):
    problems = settings_problems(config(**changes))
    assert len(problems) == (told is not None)
    assert told is None or told in problems[0]


def test_ipc_is_refused_by_name(tmp_path):
    (tmp_path / "c.yaml").write_text("weight_sync: {transport: ipc}\n")
    with pytest.raises(ConfigError) as refused:
        read_config(tmp_path / "c.yaml")
    (told,) = [line for line in str(refused.value).splitlines() if "weight_sync.transport" in line]
    assert "ipc" in told
    assert "CUDA IPC hands over weights that lie whole in the memory of the engine's own GPU" in told
    assert "use shared_storage" in told


@pytest.mark.parametrize("unfit", ["nowhere/mine", "file", "link"])
def test_a_directory_that_cannot_be_written_is_found_before_the_run(tmp_path, unfit):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    assert len(resume.unusable_weights_directory(at(tmp_path / unfit, tmp_path))) == 1


def test_a_fit_one_is_not_made_by_looking(tmp_path):
    assert resume.unusable_weights_directory(at(tmp_path / "mine", tmp_path)) == []
    assert not (tmp_path / "mine").exists()


def at(directory: Path, tmp_path: Path) -> Config:
    return config(run={"dir": str(tmp_path / "run")}, weight_sync={"directory": str(directory)})
