"""A command whose output path is a directory, device or pipe ends with one error and leaves it there."""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from dppo_megatron.cli import main
from dppo_megatron.common.files import OutputError, numbered_directory
from dppo_megatron.lab.study.grid import read_study
from dppo_megatron.lab.study.rows import add_row
from tests.lab.study.test_study import row, write_study
from tests.lab.view.runs import write_run

# Every command that writes where it is told to, and the names of the files if that is a directory.
COMMANDS = {
    "view": (["view", "RUN", "--out", "OUT"], ()),
    "view of two": (["view", "RUN", "RUN/bank", "--out", "OUT"], ()),
    "report": (["report", "RUN", "--out", "OUT"], ("report.md", "curves.png")),
    "study": (["study", "study.yaml", "--report", "--out", "OUT"], ("report.md", "curves.png", "table.csv")),
    "data prepare": (["data", "prepare", "gsm8k", "source.jsonl", "OUT"], ()),
    "data filter": (["data", "filter", "OUT", "--bank", "RUN/bank", "--pass-rate", "0:1"], ()),
    "convert": (["convert", "hf-to-megatron", "model", "OUT"], ("",)),
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Iterator[Path]:
    from make_task import write_random_model

    root = tmp_path_factory.mktemp("outputs")
    write_run(root / "at").rename(root / "RUN")
    write_random_model(root / "model", seed=1)
    (root / "source.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n')
    write_study(root)
    with contextlib.chdir(root):
        yield root


@pytest.fixture
def end(monkeypatch, capsys, workplace):
    """Runs a command with its OUT; returns exit code and message."""

    def run(command: str, out: Path) -> tuple[int, str]:
        if command == "study" and not out.is_file():
            with contextlib.suppress(OSError):  # nothing can be there
                out.mkdir(exist_ok=True)
                study = read_study(workplace / "study.yaml", out)
                add_row(out, row(study, 0, 0.9))
        arguments = [str(out) if part == "OUT" else part for part in COMMANDS[command][0]]
        monkeypatch.setattr("sys.argv", ["dppo-megatron", *arguments])
        capsys.readouterr()
        try:
            code = main()
        except SystemExit as ended:
            code = ended.code
        return code or 0, capsys.readouterr().err.strip()

    return run


def device(path: Path) -> None:
    """Makes a device like /dev/full."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 7))
    except PermissionError:
        pytest.skip("only root makes devices")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("put", [device, os.mkfifo, os.mkdir], ids=["device", "pipe", "directory"])
def test_an_output_never_replaces_a_device_a_pipe_or_a_directory(end, tmp_path, command, put):
    names = COMMANDS[command][1]
    for name in names or ("",):
        out = tmp_path / f"at-{name}"
        if name:
            out.mkdir()
        put(out / name)
        before = (out / name).lstat()
        code, said = end(command, out)
        assert code == 1
        assert str(out / name) in said
        assert len(said.splitlines()) <= 2
        after = (out / name).lstat()
        assert (after.st_mode, after.st_ino) == (before.st_mode, before.st_ino)


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"data filter"}))  # whose bank is of other prompts
def test_below_a_file_nothing_can_be_written(end, tmp_path, command):
    (tmp_path / "file").write_text("stays")
    code, said = end(command, tmp_path / "file" / "out")
    assert code == 1
    assert f"{tmp_path}/file" in said
    assert len(said.splitlines()) <= 2
    assert [path.read_text() for path in tmp_path.iterdir()] == ["stays"]


@pytest.mark.parametrize("command", ["view", "data prepare"])
def test_a_missing_place_is_made_and_a_link_followed(end, tmp_path, command):
    assert end(command, tmp_path / "a" / "b") == (0, "")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    assert end(command, tmp_path / "link") == (0, "")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == (tmp_path / "a" / "b").read_bytes()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b", "link", "target"]


def test_directories_of_evaluations_and_projects_are_named_too(workplace, monkeypatch, capsys):
    Path("plain").write_text("")
    with pytest.raises(OutputError, match=r"run.dir = plain/eval: cannot be written: Not a directory"):
        numbered_directory(Path("plain/eval"), "model", False)
    monkeypatch.setattr("sys.argv", ["dppo-megatron", "init", "plain/project"])
    with pytest.raises(SystemExit):
        main()
    assert "DIR = plain/project: cannot be written: Not a directory" in capsys.readouterr().err
