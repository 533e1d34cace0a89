"""Values that no setting takes, drawn at random, and data files that are devices or pipes: errors name the setting."""

import os
from pathlib import Path

import pytest
import yaml

from dppo_megatron.config import Config, ConfigError, read_config
from dppo_megatron.run.checks import data
from tests.attack import generator
from tests.attack.commands import LONGEST_MESSAGE, attack
from tests.attack.hostile_values import HOSTILE
from tests.support.configs import REQUIRED
from tests.support.tokenizers import save_character_model

SETTINGS = [(section, name) for section, of in Config.model_fields.items() for name in of.annotation.model_fields]
# As they stand in a file, which YAML could read as something else.
WRITTEN = [
    "2001-13-01", "2001-01-01 25:00", "1:30:00", "190:20:30", "=", "yes", "off", "0o17", "0b12", "1_", "+.inf", ".NaN",
    "!!int '1'", "!!python/name:os.system", "!!binary aGk=", "!!timestamp 2001-01-01", "*x", "&x [*x]", "[" * 100,
    "'a\x00b'", '"\\0"', '"\\ud800"', "a\x07b", "\ufdd0", "|\n    \x1b[2J", "9" * 5000, "0x" + "f" * 5000, "1e999",
    "@x", "`x`", "\u202e", "- x", "-", "%", "[", "? [a]",
]  # fmt: skip


def test_every_value_is_accepted_or_refused_by_the_name_of_its_setting(tmp_path):
    path = tmp_path / "config.yaml"

    def case(number: int) -> str:
        at = generator("value", number)
        section, setting = at.choice(SETTINGS)
        tree = {name: dict(of) for name, of in REQUIRED.items()}
        of_section = tree.pop(section, {})
        of_section.pop(setting, None)
        text = (
            at.choice(WRITTEN)
            if at.random() < 0.5
            else yaml.safe_dump(at.choice(HOSTILE), default_flow_style=True).removesuffix("...\n")
        )
        others = "".join(f"  {name}: {value}\n" for name, value in of_section.items())
        one_line = text if text.count("\n") < 2 else "\n" + "".join(f"    {line}\n" for line in text.splitlines())
        content = f"{yaml.safe_dump(tree)}{section}:\n{others}  {setting}: {one_line}\n"
        path.write_bytes(content.encode(errors="surrogatepass"))
        try:
            read_config(path)
        except ConfigError as error:
            said = str(error)
            if f"{section}.{setting}" not in said or len(said.encode()) > LONGEST_MESSAGE:
                return f"{section}.{setting}: {one_line[:100]!r}: {said}"
        return ""

    attack(600, case)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_character_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("kind", ["/dev/zero", "/dev/stdin", "pipe", "pipe.parquet", "pipe.arrow", "folder"])
def test_a_device_or_a_pipe_as_data_is_named_by_its_setting(tmp_path, model, kind, monkeypatch):
    path = Path(kind) if kind.startswith("/") else tmp_path / kind
    if kind == "folder":
        path.mkdir()
        os.mkfifo(path / "x.parquet")
    elif not path.exists():
        os.mkfifo(path)
    good = tmp_path / "good.jsonl"
    good.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    for setting, of_data, of_eval in [
        ("data.train", {"train": path}, {}),
        ("data.more.0.path", {"train": good, "more": [{"path": path, "weight": 1}]}, {}),
        ("data.eval", {"train": good, "eval": path}, {}),
        ("eval.sets.x.path", {"train": good}, {"sets": {"x": {"path": path}}}),
    ]:
        tree = REQUIRED | {"model": {"path": model}, "data": of_data, "eval": of_eval}
        (told,) = data.problems(Config.model_validate(tree), None, [], [])
        assert told.startswith(f"{setting} = {path}")
        assert "a device or a pipe" in told
