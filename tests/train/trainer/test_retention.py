"""A bank under retention stays within its plan, and every kept checkpoint can be resumed."""

import os
from types import SimpleNamespace

import pytest

from dppo_megatron.bank import BankReader, BankWriter, allow_deletion, retired_segments
from dppo_megatron.config import Config
from dppo_megatron.run.checks import settings_problems
from dppo_megatron.run.plan.totals import bank_disk
from dppo_megatron.run_dir import RunDir
from dppo_megatron.train.actor.checkpoint.directory import complete, final_path, kept_steps, partial_path
from dppo_megatron.train.trainer.checkpoints import Checkpoints
from tests.support.bank import fill, make_group, read_all
from tests.support.configs import make_config

DENSE = SimpleNamespace(moe=None)
PROMPT, LONGEST, TOPK, GROUPS, SAMPLES = 16, 96, 20, 2, 4
SIZES = {"samples": SAMPLES, "shortest": LONGEST // 2, "longest": LONGEST, "topk": TOPK}


def run_config(directory, *, steps=500, every=20, keep=2, keep_rollouts=0, staleness=1, asynchronous=False) -> Config:
    config = make_config(
        run={"dir": directory},
        data={"max_prompt_tokens": PROMPT},
        train={"steps": steps},
        rollout={"prompts_per_step": GROUPS, "group_size": SAMPLES, "max_response_tokens": LONGEST,
                 "topk_logprobs": TOPK, "max_staleness": staleness},
        checkpoint={"every": every, "keep": keep, "keep_rollouts": keep_rollouts, "asynchronous": asynchronous},
    )  # fmt: skip
    assert settings_problems(config) == []
    return config


class FakeActor:
    """Checkpoints are directories as the real ones, without weights; an asynchronous one is whole at the next save."""

    def __init__(self, asynchronous: bool):
        self.layout = SimpleNamespace(rank=0)
        self._asynchronous = asynchronous
        self._writing = lambda: None

    def save_checkpoint(self, directory, step, state, keep):
        self._writing()
        partial = partial_path(final_path(directory, step))
        partial.mkdir(parents=True, exist_ok=True)  # left by a killed process
        self._writing = lambda: complete(partial, final_path(directory, step), state, keep)
        if not self._asynchronous:
            self.finish_checkpoint()

    def finish_checkpoint(self):
        self._writing()
        self._writing = lambda: None


class Simulated:
    """Simulates a run: the orchestrator is ahead by the staleness; the trainer reads and saves checkpoints."""

    def __init__(self, config: Config):
        self.config, self.run = config, RunDir(config.run.dir)
        self.sizes: list[int] = []

    def train(self, until: int, first: int = 0) -> None:
        """Train as a process that is then killed: only files are closed."""
        config = self.config
        actor = FakeActor(config.checkpoint.asynchronous)
        checkpoints = Checkpoints(config, actor)
        reader = BankReader(self.run.bank)
        with BankWriter(self.run.bank, GROUPS, fsync=False) as bank:
            for step in range(first, until):
                ahead = min(config.train.steps, step + config.rollout.max_staleness + 1) * GROUPS
                for position in range(bank.num_train_groups, ahead):
                    bank.append(make_group(position, **SIZES))
                    self.sizes.append(sum(entry.stat().st_size for entry in os.scandir(self.run.bank)))
                reader.refresh()
                for entry in reader.entries(step * GROUPS, (step + 1) * GROUPS):
                    reader.read(entry)
                if checkpoints.due(step + 1):
                    checkpoints.save(step + 1)

    def resumable(self) -> list[int]:
        """The kept checkpoints, after every rollout that a resume from the oldest of them trains on was read."""
        kept = kept_steps(self.run.checkpoints)
        reader = BankReader(self.run.bank)
        for entry in reader.entries(kept[0] * GROUPS, reader.refresh()):
            reader.read(entry)
        return kept


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"keep": 1, "every": 1, "staleness": 0}, marks=pytest.mark.slow),
        pytest.param({"keep_rollouts": 15}, marks=pytest.mark.slow),
        pytest.param({"asynchronous": True}, marks=pytest.mark.slow),
        pytest.param(
            {"keep": 3, "every": 7, "keep_rollouts": 4, "staleness": 3, "asynchronous": True}, marks=pytest.mark.slow
        ),
    ],
)
def test_the_bank_stays_within_the_plan_and_every_kept_checkpoint_resumes(tmp_path, settings):
    config = run_config(tmp_path / "run", **{"steps": 40, "every": 5} | settings)
    plan = bank_disk(DENSE, config)
    simulated = Simulated(config)
    for until in (13, 23, 24, 40):  # killed in between
        simulated.train(until, first=(kept_steps(simulated.run.checkpoints) or [0])[-1])
        kept = simulated.resumable() if until > 13 else []
    assert max(simulated.sizes) <= plan["kept_bank_bytes"] < plan["bank_bytes"]
    assert BankReader(simulated.run.bank).refresh() == 40 * GROUPS  # the index, and with it the prompt cursor, is whole
    stays = min(kept[0], kept[-1] - config.checkpoint.keep_rollouts)
    present = sorted(int(path.stem.removeprefix("segment-")) for path in simulated.run.bank.glob("*.bin"))
    assert present == list(range(present[0], 40))
    assert present[0] <= stays


def test_without_the_setting_nothing_is_deleted(tmp_path):
    config = run_config(tmp_path / "run", steps=12, every=2, keep_rollouts=None)
    simulated = Simulated(config)
    simulated.train(12)
    assert len(list(simulated.run.bank.glob("*.bin"))) == 12
    assert not list(simulated.run.bank.glob("retain-from*"))
    assert simulated.sizes[-1] <= bank_disk(DENSE, config)["bank_bytes"]


def test_leave_grows_only_and_the_newest_data_stays(tmp_path):
    """Leave for more than there is, files of other names, and a bank that is opened again."""
    fill(tmp_path, 6)  # segments of three groups
    allow_deletion(tmp_path, 1)
    allow_deletion(tmp_path, 9)
    allow_deletion(tmp_path, 2)
    assert (tmp_path / "retain-from").read_text() == "9\n"
    (tmp_path / "segment-x.bin").touch()
    fill(tmp_path, 3, start=6)
    assert sorted(path.name for path in tmp_path.glob("*.bin")) == ["segment-000002.bin", "segment-x.bin"]
    reader = BankReader(tmp_path)
    assert reader.refresh() == 9
    assert [reader.read(entry).prompt.position for entry in reader.entries(6, 9)] == [6, 7, 8]
    with pytest.raises(Exception, match=r"segment-000000.bin: group 0 .*the file is gone"):
        read_all(tmp_path)


def test_a_new_segment_lists_no_directory(tmp_path, monkeypatch):
    """A bank has two files for each earlier step, so listing it takes longer with every step."""
    listed, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(path) or scandir(path))
    with BankWriter(tmp_path, 1, fsync=False) as bank:
        listed.clear()
        for position in range(4):
            bank.append(make_group(position, **SIZES))
        allow_deletion(tmp_path, 2)
        assert len(listed) == 1  # for a permission of an earlier version
        allow_deletion(tmp_path, 3)
        bank.append(make_group(4, **SIZES))
        assert retired_segments(tmp_path, [0, 1, 2]) == {0, 1, 2}
        assert len(listed) == 1
    assert sorted(path.name for path in tmp_path.glob("*.bin")) == ["segment-000003.bin", "segment-000004.bin"]


def test_a_permission_of_an_earlier_version_counts_until_there_is_a_wider_one(tmp_path):
    fill(tmp_path, 9)
    (tmp_path / "retain-from-000002").touch()
    (tmp_path / "segment-000001.bin").unlink()
    assert retired_segments(tmp_path, [0, 1]) == {1}
    allow_deletion(tmp_path, 1)
    assert not (tmp_path / "retain-from").exists()
    allow_deletion(tmp_path, 3)
    (tmp_path / "segment-000002.bin").unlink()
    assert retired_segments(tmp_path, [0, 1, 2]) == {1, 2}
    (tmp_path / "retain-from").write_text("-1x")  # damaged
    assert retired_segments(tmp_path, [1, 2]) == {1}


@pytest.mark.parametrize("change", [{"objective": {"name": "nll"}}, {"rollout": {"bank": "other"}}])
def test_rollouts_of_others_are_not_deleted(change):
    config = make_config(checkpoint={"keep_rollouts": 0}, **change)
    (problem,) = [p for p in settings_problems(config) if "keep_rollouts" in p]
    assert problem.startswith("checkpoint.keep_rollouts = 0: the run does not sample rollouts")
