"""Each malformed or hostile config gives one clear error of at most a screen."""

import itertools
import os
import time
import types
import typing

import pytest

from dppo_megatron.config import Config, ConfigError
from dppo_megatron.config.section import Section
from dppo_megatron.errors import LONGEST_MESSAGE, ExpectedError, bounded, listing, shown
from dppo_megatron.run.checks import load_config
from tests.support.configs import REQUIRED

BASE = "run: {dir: x}\nmodel: {path: m}\ndata: {train: t}\ntrain: {steps: 1}\n"


def refused(tmp_path, text: str | bytes, overrides=()) -> str:
    path = tmp_path / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    start = time.process_time()  # not of what else the machine does
    with pytest.raises(ConfigError) as raised:
        load_config(path, overrides)
    assert time.process_time() - start < 10
    assert len(str(raised.value).encode()) <= LONGEST_MESSAGE
    return str(raised.value)


def numbers() -> list[tuple[str, str, type]]:
    """Section, setting and type of every setting that is a number or several."""
    found = []
    for name, field in Config.model_fields.items():
        for setting, inner in field.annotation.model_fields.items():
            for kind in scalars(inner.annotation):
                if kind in (int, float):
                    found.append((name, setting, kind))
    return found


def scalars(annotation) -> list[type]:
    if typing.get_origin(annotation) is typing.Annotated:
        return scalars(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, tuple):
        return [kind for inner in typing.get_args(annotation) for kind in scalars(inner)]
    return [annotation]


def wrong(section: str, setting: str, value) -> str:
    tree = {name: dict(settings) for name, settings in REQUIRED.items()}
    several = Config.model_fields[section].annotation.model_fields[setting].annotation
    tree.setdefault(section, {})[setting] = [value] if typing.get_origin(several) is tuple else value
    with pytest.raises(ValueError, match=rf"{section}\.{setting}") as raised:
        Config.model_validate(tree)
    return str(raised.value)


def test_there_are_numbers_to_check():
    assert len(numbers()) > 60
    assert all(issubclass(field.annotation, Section) for field in Config.model_fields.values())


@pytest.mark.parametrize(("section", "setting", "kind"), numbers(), ids=lambda part: getattr(part, "__name__", part))
def test_every_number_is_finite_of_a_size_that_can_be_meant_and_no_truth_value(section, setting, kind):
    for value in (True, False):
        assert "not true or false" in wrong(section, setting, value)
    for value in (float("inf"), float("-inf"), float("nan"), -1e300, 10**21 if kind is int else 1e300):
        wrong(section, setting, value)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.min_lr=.inf", "optimizer.min_lr"),
        ("rollout.stop_token_ids=[2, -1]", "rollout.stop_token_ids.1 = -1"),
        ("train.steps=1:30", "train.steps = '1:30'"),
        ("engine={port: 65530, count: 8}", "engine.port = 65530: with engine.count = 8"),
        ("engine.urls=[http://127.0.0.1:70000]", "http://HOST:PORT, with a port of at most 65535"),
        ("engine.urls=[127.0.0.1]", "http://HOST:PORT"),
        ("engine.urls=[http://127.0.0.1:8000/v1]", "must be http://HOST:PORT; remove /v1"),
        ("slurm.time=12", 'slurm.time = 12: would be 12 minutes for sbatch; write "12:00:00" for hours'),
        ("optimizer.lr=1e-30", "must be 1e-12 to 0.1"),
        ("optimizer.weight_decay=11", "optimizer.weight_decay = 11: must be at most 10"),
        ("optimizer.lr=1e3", "optimizer.lr = 1000.0: Adam changes every weight by about lr in an update"),
        ("eval.sets={a: {path: x, samples: 8}}", "eval.sets.a.samples: unknown setting; valid here: path, prompt_"),
        ("data.more=[{path: x, wieght: 2}]", "data.more.0.wieght: unknown setting; did you mean data.more.0.weight?"),
        ("engine.env={A=B: c}", "engine.env.A=B"),
        ("run.dir=", "run.dir = '': is empty"),
        (f"run.dir={'d' * 300}", "too long for a path"),
        ('run.dir="a\\nb"', "contains an unprintable character"),
        ("objective.settings={delta: 1" + "0" * 31 + "}", "objective.settings.delta"),
        ("objective.settings={delta: 1e-60}", "must be a finite number or None, of 1e-30 to 1e+30"),
        ("objective.settings={delta: !!binary aGk=}", "a tag"),
        ("engine.kv_cache_bytes=8", "engine.kv_cache_bytes = 8: counts bytes; write 8589934592 for 8GiB"),
        ("weight_sync.bucket_bytes=256MB", "weight_sync.bucket_bytes = '256MB': counts bytes; write 268435456 for"),
        ("weight_sync.read_ahead_bytes=4", "weight_sync.read_ahead_bytes = 4: counts bytes; write 4294967296 for"),
        ("run.dir=/scratch/$USER/x", "run.dir = '/scratch/$USER/x': ~ and $NAME are not replaced"),
        ("engine.secret_file=~/secret", "engine.secret_file = '~/secret': ~ and $NAME are not replaced"),
        (
            'slurm.sbatch_args=["--qos=high --mem=1G"]',
            "slurm.sbatch_args.0 = '--qos=high --mem=1G': must be one option",
        ),
        ("slurm.sbatch_args=[--nodes=4]", "slurm.sbatch_args.0 = '--nodes=4': must be one option without quotes that"),
        (
            "slurm.sbatch_args=[-N4]",
            "slurm.sbatch_args.0 = '-N4': must be one option without quotes that no other setting",
        ),
        ('slurm.srun_args=["--mpi=pmix --export=ALL"]', "slurm.srun_args.0 = '--mpi=pmix --export=ALL': must be one"),
        ('slurm.command=["apptainer exec x.sif"]', "slurm.command.0 = 'apptainer exec x.sif': must be one word of a"),
        ("slurm.setup=module load gcc", "slurm.setup = 'module load gcc': must be a list; write [module load gcc]"),
        ("slurm.signal_lead_s=90000", "slurm.signal_lead_s = 90000: must be at most 65535"),
        ("train=steps:12", "train = 'steps:12': no blank after the colon; write one"),
        ("objective.settings={delta:0.2}", "no blank after the colon of delta:0.2; write one"),
        ("reward.name=“a:b”", "begins with “, which is no quote in YAML; write \" or '"),
    ],
)
def test_implausible_values_are_refused(tmp_path, override, expected):
    assert expected in refused(tmp_path, BASE, [override])


def test_times_of_day_and_leading_zeros_are_not_read_as_base_60_or_octal(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(BASE)
    config = load_config(path, ["slurm.time=12:00:00", "rollout.max_response_tokens=010", "train.steps=1_000"])
    assert config.slurm.time == "12:00:00"
    assert config.rollout.max_response_tokens == 10
    assert config.train.steps == 1000


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]\n" for n in range(1, 12)
)
MERGED = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 8)}]}}\n" for n in range(1, 12))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (BOMB, "aliases (*name) stand for more values"),
        (MERGED, "aliases (*name) stand for more values"),
        ("run: &a {dir: [*a]}\n", "*a contains itself"),
        ("run: " + "[" * 5000 + "]" * 5000, "nested more than 32 levels deep"),
        ("".join(" " * n + "a:\n" for n in range(600)), "nested more than 32 levels deep"),
        (
            BASE + "tracking:\n  wandb_name: a\x00b",
            "line 6, column 15: tracking.wandb_name: contains the control character U+0000",
        ),
        (BASE + 'tracking: {wandb_name: "\\0"}', "tracking.wandb_name: contains the control character U+0000"),
        (BASE + 'tracking: {wandb_name: "\\ud800"}', "tracking.wandb_name: contains the control character U+D800"),
        (BASE + "tra\x00cking: 1", "line 5, column 1: contains the control character U+0000"),
        (BASE + "optimizer: {warmup_updates: 2001-13-01}", "optimizer.warmup_updates = '2001-13-01': "),
        (BASE + "optimizer: {warmup_updates: =}", "optimizer.warmup_updates = '=': "),
        (BASE + "optimizer: {warmup_updates: no}", "optimizer.warmup_updates = False: "),
        (BASE + f"optimizer: {{warmup_updates: {'9' * 5000}}}", "optimizer.warmup_updates = '9999"),
        (BASE + "optimizer: {warmup_updates: !!int '1'}", "optimizer.warmup_updates: a tag"),
        (BASE + "optimizer: {warmup_updates: *x}", "optimizer.warmup_updates: * begins a reference, and nothing has"),
        (BASE + "optimizer:\n\tlr: 1\n", "line 6, column 1: optimizer: a tab, which YAML does not allow here"),
        (BASE + "optimizer:\n  lr: 1\n\tmin_lr: 1\n", "line 7, column 1: optimizer: a tab, which"),
        (BASE + "optimizer: {warmup_updates: [1}", "optimizer.warmup_updates: [ or { is not closed"),
        (BASE.encode() + b"# caf\xe9\n", "line 5: not UTF-8"),
        (BASE + "x: !!python/object/apply:os.system [ls]", "line 5, column 4: x: a tag"),
        ("x" * (1 << 19), "a config has at most"),
        (BASE + f"x: {'y' * 200_000}\n", "x: unknown setting"),
        (BASE + f"? {'y' * 200_000}\n: 1\n", "unknown setting"),
        (BASE + "".join(f"y{n}: 1\n" for n in range(5000)), "more"),
        (f"run: {{dir: x, seed: {'z' * 200_000}}}\n", "run.seed = 'zzz"),
        (BASE + "? [a, b]\n: 1\n", "a name must be text; put it in quotes"),
        (BASE + "1: 2\nnull: 3\n", "1 = 1: its name must be text; put it in quotes"),
        ("", "must be a mapping"),
        (BASE + "tracking:\n\u00a0\u00a0wandb: offline\n", "name has the invisible character U+00A0; use blanks"),
        (BASE + "\u200btracking: {wandb: offline}\n", "name has the invisible character U+200B; use blanks"),
    ],
    ids=itertools.count(),
)
def test_hostile_yaml_is_one_short_error(tmp_path, text, expected):
    assert expected in refused(tmp_path, text)


def test_a_path_that_is_empty_or_a_directory_or_a_pipe_is_no_config(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is a pipe; pass"):
        load_config(tmp_path / "pipe")
    for path in ("", tmp_path):
        with pytest.raises(ConfigError, match="a directory, as an empty path is; pass the path of a YAML config"):
            load_config(path)
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ConfigError, match=f"a directory, as an empty path is; pass {tmp_path}/config.yaml$"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    "override", ["." * 5000 + "=1", "a." * 3000 + "b=1", "=" * 5000, "run.dir=\udcff", "x" * 100_000]
)
def test_hostile_overrides_are_one_short_error(tmp_path, override):
    refused(tmp_path, BASE, [override])


def test_an_override_changes_one_of_two_names_for_the_same_section(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(BASE + "parallel: &p {timeout_s: 5}\nweight_sync: *p\n")
    config = load_config(path, ["parallel.timeout_s=7"])
    assert (config.parallel.timeout_s, config.weight_sync.timeout_s) == (7, 5)


def test_every_expected_error_is_at_most_a_screen_and_can_be_printed():
    text = str(ExpectedError("a\x1b[2J" + "\ud800" + "é" * 100_000))
    assert len(text.encode()) <= LONGEST_MESSAGE
    assert text.startswith("a\\x1b[2J\\ud800é")
    assert text.endswith("(100006 characters)")
    assert str(ExpectedError("two\nlines")) == "two\nlines"


def test_a_list_of_problems_shows_as_many_as_fit_and_counts_the_others():
    assert listing("c.yaml", ["a", "b"]) == "c.yaml: 2 problems\n  - a\n  - b"
    text = listing("c.yaml", [f"problem {n} {'x' * 5000}" for n in range(1000)])
    assert len(text.encode()) <= LONGEST_MESSAGE
    lines = text.splitlines()
    assert lines[0] == "c.yaml: 1000 problems"
    assert lines[-1] == f"  ... and {1000 - (len(lines) - 2)} more"
    assert len(listing("c.yaml", ["line\n" * 5000]).encode()) <= LONGEST_MESSAGE


def test_long_problems_share_the_space_that_short_ones_leave():
    text = listing("c.yaml", [*["short"] * 10, "a" * 1000, "b" * 3000, "c" * 5000])
    assert "a" * 1000 + "\n" in text
    assert "b" * 1390 in text
    assert "c" * 1390 in text
    assert len(text.encode()) > LONGEST_MESSAGE - 100


def test_other_problems_do_not_shorten_the_first_ones():
    problems = ["é" * 700, "b" * 1500, *(f"problem {n} {'x' * 300}" for n in range(40))]
    lines = listing("c.yaml", problems, 2).splitlines()
    assert lines[1:3] == [f"  - {problem}" for problem in problems[:2]]
    assert lines[-1] == f"  ... and {len(problems) - (len(lines) - 2)} more"
    assert len(listing("c.yaml", ["a" * 5000, "b" * 5000], 2).encode()) <= LONGEST_MESSAGE


def test_values_are_shortened():
    assert shown("short") == "'short'"
    assert len(shown("x" * 10**6)) < 200
    assert len(shown([["x" * 1000] * 1000] * 1000)) < 2000
    assert shown(16**10_000) == "<int>"
    assert bounded("x" * 10, 100) == "x" * 10
