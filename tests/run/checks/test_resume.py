"""Directories of a run: one belongs to one run, a resumed run is the same run, and all can be written."""

import contextlib
import re
from pathlib import Path

import pytest

from dppo_megatron.common.files import DamagedFile
from dppo_megatron.config import Config, ConfigError, save_resolved
from dppo_megatron.errors import ExpectedError
from dppo_megatron.run.checks import check_job, check_run_dir, preflight
from dppo_megatron.run.checks.resume import contents, record, unusable_weights_directory
from dppo_megatron.run_dir import RunDir
from tests.support.configs import make_config


@pytest.fixture
def tree(tmp_path) -> dict:
    return {
        "run": {"dir": str(tmp_path / "run")},
        "model": {"path": "model"},
        "data": {"train": "train.jsonl"},
        "train": {"steps": 1},
    }


def check(tree: dict, *, resume: bool) -> None:
    check_run_dir(Config.model_validate(tree), "config.yaml", resume=resume)


def test_a_directory_that_holds_a_run_needs_resume(tree, tmp_path):
    check(tree, resume=False)
    (tmp_path / "run" / "bank").mkdir(parents=True)
    with pytest.raises(ConfigError, match="--resume"):
        check(tree, resume=False)


@pytest.fixture
def started(tree, tmp_path) -> Path:
    """The run directory of a run that was started with `tree`."""
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    save_resolved(Config.model_validate(tree), run.config)
    return run.root


def test_resume_accepts_permitted_changes_and_names_a_forbidden_one(tree, started):
    tree["train"]["steps"] = 5
    tree["engine"] = {"max_num_seqs": 8}
    tree["profile"] = {"steps": [3], "memory": True}
    tree["optimizer"] = {"lr": Config.model_validate(tree).optimizer.lr / 2}
    check(tree, resume=True)
    tree["run"]["seed"] = 2
    with pytest.raises(ConfigError, match=r"run\.seed = 2: the run was started with 1"):
        check(tree, resume=True)


@pytest.mark.parametrize(
    ("decay", "before", "now", "problem"),
    [
        ("constant", {}, {"steps": 16}, None),
        ("cosine", {}, {"steps": 8}, None),
        ("cosine", {}, {"steps": 16}, r"train\.steps = 16: optimizer\.decay = cosine ended with step 8, .* to keep"),
        ("linear", {}, {"steps": 4}, r"train\.steps = 4: optimizer\.decay = linear ended with step 8"),
        ("linear", {"decay_steps": 6}, {"steps": 8}, r"ended with step 6"),
        ("cosine", {}, {"steps": 16, "decay_steps": 8}, None),
        ("cosine", {}, {"steps": 16, "decay_steps": 16}, None),
    ],
)
def test_more_steps_do_not_move_a_decay_silently(tree, tmp_path, decay, before, now, problem):
    tree["optimizer"] = {"decay": decay, **before}
    tree["train"]["steps"] = 8
    (tmp_path / "run").mkdir()
    save_resolved(Config.model_validate(tree), RunDir(tmp_path / "run").config)
    tree["train"]["steps"] = now["steps"]
    tree["optimizer"] = {"decay": decay, "decay_steps": now.get("decay_steps")}
    with contextlib.nullcontext() if problem is None else pytest.raises(ConfigError, match=problem):
        check(tree, resume=True)


def damaged(path: Path) -> None:
    """Change one byte in the middle of a file, and keep its size."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture
def named(tree, tmp_path) -> dict:
    """`tree` with files for every kind of setting that names some, recorded as at the start of a run."""
    for name in ("model/config.json", "model/chat_template.jinja", "model/vocab.bpe", "model/.metadata",
                 "model/additional_chat_templates/tool_use.jinja", "data/train-0.jsonl", "data/train-1.jsonl",
                 "more.jsonl", "bank/segment-000000.jsonl", "adapter/adapter_config.json"):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"a line of {name}\n")
    tree["model"] = {"path": str(tmp_path / "model"), "lora": {"r": 4, "adapter": str(tmp_path / "adapter")}}
    tree["data"] = {"train": str(tmp_path / "data/train-*.jsonl"), "more": [{"path": str(tmp_path / "more.jsonl")}]}
    tree |= {"rollout": {"bank": str(tmp_path / "bank")}, "eval": {"sets": {"a": {"path": str(tmp_path / "data")}}}}
    (tmp_path / "run").mkdir()
    record(Config.model_validate(tree))
    return tree


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: damaged(d / "data/train-1.jsonl"), "data.train = .*train-1.jsonl is not as at the start.*restore"),
        (lambda d: damaged(d / "data/train-0.jsonl"), "eval.sets.a.path = .*train-0.jsonl is not as"),
        (lambda d: damaged(d / "more.jsonl"), "data.more.0.path = .*: the file is not as"),
        (lambda d: damaged(d / "model/config.json"), "model.path = .*: config.json is not as"),
        *(
            (lambda d, name=name: damaged(d / "model" / name), f"model.path = .*: {name} is not as")
            for name in ("vocab.bpe", ".metadata", "additional_chat_templates/tool_use.jinja")
        ),
        (lambda d: (d / "model/tokenizer.json").touch(), "model.path = .*: tokenizer.json is not as"),
        (lambda d: (d / "model/chat_template.jinja").unlink(), "model.path = .*: chat_template.jinja is not as"),
        (lambda d: damaged(d / "adapter/adapter_config.json"), "model.lora.adapter = .*: adapter_config.json is not"),
        (lambda d: damaged(d / "bank/segment-000000.jsonl"), "rollout.bank = .*: segment-000000.jsonl is not as"),
    ],
)
def test_a_resume_compares_the_files_that_settings_name(named, tmp_path, change, problem):
    check(named, resume=True)
    change(tmp_path)
    with pytest.raises(ConfigError, match=problem):
        check(named, resume=True)


def test_files_may_move_and_a_bank_may_grow(named, tmp_path):
    with (tmp_path / "bank/segment-000000.jsonl").open("a") as index:
        index.write("another group\n")
    (tmp_path / "model/README.md").touch()
    for name in ("model", "data", "more.jsonl"):
        (tmp_path / name).rename(tmp_path / f"moved-{name}")
    named["model"]["path"] = str(tmp_path / "moved-model")
    named["data"] = {
        "train": str(tmp_path / "moved-data/train-*.jsonl"),
        "more": [{"path": str(tmp_path / "moved-more.jsonl")}],
    }
    named["eval"]["sets"]["a"]["path"] = str(tmp_path / "moved-data")
    check(named, resume=True)
    (tmp_path / "run/files.json").unlink()  # as in a run that recorded no digests
    with pytest.raises(ConfigError, match=r"data.train = .*moved-data.*: the run was started with"):
        check(named, resume=True)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "the whole is b''"),
        ("{", "the whole is b'{'"),
        ("[]", "the whole is []: Input should be an object"),
        ('{"data.train": "a"}', "data.train is 'a'"),
        ('{"data.train": null}', "data.train is None"),
        ('{"data.train": {"train-0.jsonl": 5}}', "data.train.train-0.jsonl is 5: Input should be a valid string"),
    ],
)
def test_damaged_digests_are_one_error_with_the_file(named, tmp_path, content, problem):
    (tmp_path / "run/files.json").write_text(content)
    for use in (lambda: check(named, resume=True), lambda: record(Config.model_validate(named))):
        with pytest.raises(DamagedFile, match=re.escape(f"{tmp_path}/run/files.json: {problem}") + ".*; restore it"):
            use()


def test_a_large_file_is_sampled(tmp_path, monkeypatch):
    monkeypatch.setattr("dppo_megatron.run.checks.resume.PIECE", 1 << 12)
    monkeypatch.setattr("dppo_megatron.run.checks.resume.SAMPLE", 1 << 6)
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(1 << 22))
    before = contents("model.path", tmp_path)
    for place in (0, 4095, 1 << 21, (1 << 22) - (1 << 14)):
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"x")
        assert contents("model.path", tmp_path) != before, place
        path.write_bytes(bytes(1 << 22))
    assert contents("model.path", tmp_path) == before


def test_resume_without_a_run_is_an_error_and_a_run_may_move(tree, started, tmp_path):
    tree["run"]["dir"] = str(tmp_path / "mistyped")
    with pytest.raises(ConfigError, match=r"run\.dir = .*mistyped: no run to resume, .*config.yaml is missing"):
        check(tree, resume=True)
    started.rename(tmp_path / "mistyped")
    check(tree, resume=True)


def test_a_run_finds_its_model_from_other_directories(tmp_path, monkeypatch):
    """An old run recorded `models/m`, relative to the directory that it was started in."""
    monkeypatch.chdir("/")
    run = RunDir(tmp_path / "runs" / "a")
    assert run.model("models/m") is None
    for place in (run.final_model, tmp_path / "models/m"):
        place.mkdir(parents=True)
        (place / "config.json").touch()
        assert run.model("models/m") == place
    assert run.model(None) == run.final_model


def test_settings_nodes_and_run_directory_of_a_job_are_reported_at_once(tree, tmp_path):
    (tmp_path / "run" / "bank").mkdir(parents=True)
    tree |= {"rollout": {"top_p": 0.5}, "slurm": {"heterogeneous": True}}
    with pytest.raises(ConfigError) as raised:
        check_job(Config.model_validate(tree), "config.yaml", resume=False, nodes=(2,))
    named = [line.partition(" = ")[0] for line in raised.value.violations]
    assert named == ["rollout.top_p", "slurm.heterogeneous", "slurm.trainer_nodes", "run.dir"]


@pytest.mark.parametrize("place", ["/dev/null/run", "{tmp}/file/run", "{tmp}/file", "{tmp}/link"])
def test_a_directory_that_cannot_be_made_is_refused(tree, tmp_path, place):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("absent")
    tree["run"]["dir"] = place.format(tmp=tmp_path)
    for resume in (False, True):
        with pytest.raises(ConfigError, match=f"run.dir = {tree['run']['dir']}: .*; choose another run.dir"):
            check(tree, resume=resume)
    with pytest.raises(ConfigError, match=r"run\.dir = "):
        preflight(Config.model_validate(tree), "config.yaml")


def test_a_directory_that_cannot_be_written_is_refused(tree, tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    with pytest.raises(ConfigError, match=f"{tmp_path} is not writable; choose another run.dir"):
        check(tree, resume=False)


def test_a_run_in_the_directory_of_its_model_is_refused(tree, tmp_path):
    (tmp_path / "model").mkdir()
    tree["model"]["path"] = str(tmp_path / "model")
    for place in (tmp_path, tmp_path / "model"):  # a run writes its final model into RUN/model
        tree["run"]["dir"] = str(place)
        with pytest.raises(ConfigError, match=f"run.dir = {place}: the run would write into model.path; choose"):
            check(tree, resume=False)


def test_a_run_directory_that_cannot_be_made_is_one_clear_error():
    with pytest.raises(ExpectedError, match=r"run\.dir = /proc/nothing/run: cannot be made: .*; choose another"):
        RunDir(Path("/proc/nothing/run")).make()


@pytest.mark.parametrize(("name", "problems"), [("nowhere/mine", 1), ("file", 1), ("link", 1), ("mine", 0)])
def test_a_weights_directory_that_cannot_be_written_is_found_before_the_run(tmp_path, name, problems):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    config = make_config(run={"dir": str(tmp_path / "run")}, weight_sync={"directory": str(tmp_path / name)})
    assert len(unusable_weights_directory(config)) == problems
    assert not (tmp_path / "mine").exists()
