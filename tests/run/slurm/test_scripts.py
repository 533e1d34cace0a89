"""The batch scripts of the repository and scripts written from a config, as sbatch reads them."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dppo_megatron.config import ConfigError, validated
from dppo_megatron.run.slurm.script import batch_script, site_scripts
from tests.support.slurm.config import config
from tests.support.slurm.sbatch import words

ROOT = Path(__file__).parents[3]
SCRIPTS = sorted((ROOT / "slurm").glob("*.sbatch"))
RELIED_ON = {"--open-mode", "--requeue", "--signal"}


def options(script: str) -> list[str]:
    """Names of the options that sbatch takes: those before the first command."""
    head = re.split(r"^(?!#)\S", script, maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(r"^#SBATCH (--[\w-]+|hetjob)", head, flags=re.MULTILINE)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_sbatch_reads_every_option(script):
    text = script.read_text()
    assert len(options(text)) == text.count("\n#SBATCH ")
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.parametrize(("command", "wanted"), [(None, "eval"), ("sample", "sample")])
def test_one_script_evaluates_and_samples(tmp_path, command, wanted):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").write_text('dppo-megatron() { echo "$@"; }; exec() { "$@"; }\n')
    environment = os.environ | {"VENV": str(tmp_path)} | ({"COMMAND": command} if command else {})
    script = ["bash", ROOT / "slurm/eval.sbatch", "c.yaml", "--n", "16"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{wanted} c.yaml --n 16\n"


def test_the_scripts_of_the_repository_equal_those_of_the_template():
    """Else: python -m dppo_megatron.run.slurm.script slurm"""
    assert {script.name: script.read_text() for script in SCRIPTS} == site_scripts()


@pytest.mark.parametrize("heterogeneous", [False, True])
def test_a_written_script_has_the_options_of_the_one_in_the_repository(heterogeneous):
    name = "train_hetjob.sbatch" if heterogeneous else "train.sbatch"
    text = (ROOT / "slurm" / name).read_text()
    written = batch_script(config(heterogeneous=heterogeneous), resume=True, directory=Path("/somewhere"))
    assert set(options(written)) - {"--chdir"} == set(options(text))
    assert set(options(text)) >= RELIED_ON
    assert written.splitlines()[-1].endswith("-m dppo_megatron slurm-job run/config.yaml --resume")


def test_a_written_script_holds_the_site_s_settings():
    site = {
        "account": "lab", "partition": "big", "engine_partition": "small", "heterogeneous": True, "time": "01:00:00",
        "engine_gpus_per_node": 4, "setup": ["module load cuda"], "sbatch_args": ["--qos=high"], "exclusive": False,
    }  # fmt: skip
    trainers, engines = batch_script(
        config(engines=2, **site), resume=False, directory=Path("/somewhere")
    ).split("#SBATCH hetjob")  # fmt: skip
    for line in ("--account=lab", "--partition=big", "--nodes=2", "--gpus-per-node=8", "--time=01:00:00", "--qos=high"):
        assert f"#SBATCH {line}\n" in trainers
    for line in ("--account=lab", "--partition=small", "--nodes=1", "--gpus-per-node=4", "--time=01:00:00"):
        assert f"#SBATCH {line}\n" in engines
    assert "--qos" not in engines
    assert "--exclusive" not in trainers
    assert "\nmodule load cuda\nexec " in engines


TEXT = st.text() | st.text("ab1-=:,. #\"'\\\\$()%\r\n\t") | st.from_regex(r"--[a-z]+=[a-b =#$()%]*", fullmatch=True)
PLAIN = {
    "account": "plain", "partition": "plain", "engine_partition": "plain", "gpu_type": "plain", 
    "engine_gpu_type": "plain", "time": "77:77", "sbatch_args": "--plain", "engine_sbatch_args": "--plain",
}  # fmt: skip


def read_with(setting: str, text: str) -> list[str]:
    tree = config(heterogeneous=True, engine_gpus_per_node=4).model_dump()
    tree["slurm"][setting] = [text] if setting.endswith("args") else text
    return words(batch_script(validated(tree, "c"), resume=False, directory=Path("/somewhere")))


@pytest.mark.parametrize("setting", PLAIN)
@settings(deadline=None)
@given(text=TEXT)
@example(text="x --wrap=reboot")
@example(text="x\n#SBATCH --wrap=reboot")
@example(text="x\rreboot")
@example(text="--comment=a # b $(touch owned)")
@example(text="2-12")
def test_sbatch_reads_a_setting_s_text_as_part_of_one_word_or_it_is_refused_by_name(setting, text):
    try:
        read = read_with(setting, text)
    except ConfigError as refused:
        assert f"slurm.{setting}" in str(refused)  # noqa: PT017
        return
    assert read == [word.replace(PLAIN[setting], text) for word in read_with(setting, PLAIN[setting])]


@settings(deadline=None)
@given(name=st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=60))
@example(name='a b#"$(touch owned)')
@example(name="50%j")
@example(name="a\n#SBATCH --wrap=reboot")
@example(name="a\\b")
def test_sbatch_reads_the_directories_unchanged_or_they_are_refused_by_name(name):
    try:
        tree = config().model_dump() | {"run": {"dir": f"/runs/{name}"}}
        read = words(batch_script(validated(tree, "c"), resume=False, directory=Path("/somewhere", name)))
    except ConfigError as refused:
        assert re.search("run.dir|working directory", str(refused))  # noqa: PT017
        return
    assert f"--chdir={Path('/somewhere', name)}" in read
    assert f"--output={Path('/runs', name.replace('%', '%%'))}/logs/slurm-%j.out" in read
    assert any(word.startswith("--job-name=") for word in read)


@pytest.mark.parametrize("gres", ["h100:8", "gpu:h100:8", "gpu:h100:8(S:0-1)", "gpu:8(S:0-1)", "gpu:8", "8"])
def test_gpus_are_counted_as_slurm_writes_them(gres):
    tree = config(gpus_per_node=gres, heterogeneous=True, engine_gpus_per_node="gpu:1g.10gb:4(IDX:0-3)")
    assert (tree.slurm.gpus_per_node, tree.slurm.serving_gpus_per_node) == (8, 4)
    script = words(batch_script(tree, resume=False, directory=Path("/somewhere")))
    assert [word.partition("=")[2] for word in script if word.startswith("--gpus-per-node")] == [
        "h100:8" if "h100" in gres else "8",
        "1g.10gb:4",
    ]


@pytest.mark.parametrize("gres", ["gpu:h100", "gpu:h100:8,gpu:a100:2", "gpu:a b:8", "h100:8\n"])
def test_other_counts_of_gpus_are_refused(gres):
    with pytest.raises(ValueError, match=r"slurm\.gpus_per_node"):
        config(gpus_per_node=gres)


@pytest.mark.parametrize(
    ("task", "objective", "run"),
    [
        (1, ["objective.name=dppo_binary_tv"], "dppo_binary_tv-2"),
        (3, ["objective.name=drpo", "objective.settings={}"], "drpo-1"),
        (
            12,
            ["objective.name=dppo_binary_tv", "objective.settings={delta: 0.3, ratio_cap: 4}"],
            "dppo_binary_tv-delta-0.3-ratio_cap-4-1",
        ),
        (15, ["objective.name=my_objectives:mine"], "my_objectives-mine-1"),
    ],
)
def test_a_sweep_keeps_the_config_s_objective_settings_and_varies_them(tmp_path, task, objective, run):
    script = (ROOT / "slurm" / "sweep.sbatch").read_text()
    more = '  "dppo_binary_tv {delta: 0.3, ratio_cap: 4}"\n  "my_objectives:mine"\n'
    (tmp_path / "sweep.sbatch").write_text(script.replace('  "cispo {}"\n', f'  "cispo {{}}"\n{more}'))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").write_text(f"PATH={tmp_path}/bin:$PATH")
    program = tmp_path / "bin" / "dppo-megatron"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    environment = os.environ | {"SLURM_ARRAY_TASK_ID": str(task), "VENV": str(tmp_path), "RUNS": "runs", "MODULES": ""}
    command = ["bash", "sweep.sbatch", "config.yaml", "--set", "train.steps=3"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    given = done.stdout.splitlines()
    assert given[:4] == ["slurm-job", "config.yaml", "--set", "train.steps=3"]
    settings = [word for word in given[4:] if word != "--set"]
    assert settings == [*objective, f"run.seed={task % 3 + 1}", f"run.dir=runs/{run}"]
