"""The config tree: every violation at once, nearest names, overrides, cross-field rules."""

import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from dppo_megatron.cli import app
from dppo_megatron.config import Config, ConfigError, load, read_config, save_resolved, with_absolute_paths
from dppo_megatron.config.load import run_of
from dppo_megatron.objectives.settings import _OTHER_NAMES, AXES
from dppo_megatron.run.checks import load_config
from tests.support.configs import make_config
from tests.support.configs import write_config_file as write

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").rglob("*.yaml"))


def violations(path, overrides=()):
    with pytest.raises(ConfigError) as raised:
        load_config(path, overrides)
    return "\n".join(raised.value.violations)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: str(p.relative_to(p.parents[1])))
def test_every_example_is_valid(path):
    load_config(path)


def test_defaults_are_filled_and_saved(tmp_path):
    config = load_config(write(tmp_path))
    saved = tmp_path / "resolved.yaml"
    save_resolved(config, saved)
    assert load_config(saved) == config
    assert yaml.safe_load(saved.read_text())["rollout"]["temperature"] == 1.0


def test_paths_are_those_of_the_working_directory_wherever_a_process_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = with_absolute_paths(
        load_config(write(tmp_path, engine={"python": "python3"}, data={"eval": "/x/eval.jsonl"}))
    )
    assert (config.run.dir, config.model.path) == (tmp_path / "unused", tmp_path / "unused")
    assert (config.data.train, config.data.eval) == (tmp_path / "unused.jsonl", Path("/x/eval.jsonl"))
    assert (config.engine.python, config.model.weights) == (Path("python3"), None)


@pytest.mark.parametrize("mark", ["run.lock", "files.json"])
def test_the_config_in_a_run_directory_means_that_run(tmp_path, mark):
    """Also in a copy and after a move. A config elsewhere, and --set, keep their run.dir."""
    copy = tmp_path / "copy" / "config.yaml"
    copy.parent.mkdir()
    save_resolved(load_config(write(tmp_path, run={"dir": str(tmp_path / "original")})), copy)
    for keeps in (read_config(copy).run.dir, run_of(copy)):
        assert keeps == tmp_path / "original"
    (copy.parent / mark).touch()
    for moved in (read_config(copy).run.dir, load_config(copy).run.dir, run_of(copy)):
        assert moved == copy.parent
    assert read_config(copy, [f"run.dir={tmp_path}"]).run.dir == tmp_path
    other = copy.rename(copy.with_name("other.yaml"))
    assert read_config(other).run.dir == run_of(other) == tmp_path / "original"
    assert run_of(copy.parent) == copy.parent
    copy.write_text("train: [a damaged config")
    assert run_of(copy) == copy.parent


@pytest.mark.parametrize("command", ["status", "doctor", "report", "view", "audit", "convert megatron-to-hf"])
def test_commands_on_runs_take_a_config_too(tmp_path, command):
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.lock").touch()
    save_resolved(load_config(write(tmp_path, run={"dir": str(tmp_path / "original")})), run / "config.yaml")
    (run / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "train/loss": 0.5}\n')
    results = [
        CliRunner().invoke(app, [*command.split(), str(path), *([str(tmp_path / "out")] if " " in command else [])])
        for path in (run, run / "config.yaml")
    ]
    texts = [re.sub(r"\d+:\d\d:\d\d ago", "", f"{done.output}{done.exception}") for done in results]
    assert texts[0] == texts[1].replace(f"{run}/config.yaml", str(run))
    assert str(tmp_path / "original") not in texts[1]


TYPOS = {"model": {"dtpe": "fp32"}, "train": {"steps": "many"}, "rollout": {"temprature": 1}}
UNKNOWN = "model.dtpe: unknown setting; did you mean model.dtype?"
SAMPLING = {"rollout": {"top_p": 0.9, "topk_logprobs": 100, "group_size": 1}}
ENGINE = {"max_model_len": 4096}
SENDERS = {"world_size": 256, "tensor": 8, "pipeline": 16, "expert": 16, "expert_tensor": 1}
BROKEN = ("engine.extra_args=[--foo", "data.prompt_template={prompt}: solve")


@pytest.mark.parametrize(
    ("sections", "overrides", "found"),
    [
        (TYPOS, (), [UNKNOWN, "; did you mean rollout.temperature?", "train.steps = 'many'"]),
        (SAMPLING, (), ["rollout.top_p = 0.9", "rollout.topk_logprobs = 100: above the", "every advantage is 0"]),
        ({"train": {"group_size": 4}}, (), ["did you mean rollout.group_size?"]),
        ({"train": {"updates_per_step": 10**6}}, (), ["an update trains on whole groups"]),
        *(({}, [override], [override]) for override in ("optimizer.lr", "=3", "run.dir.deeper=3")),
        *(({}, [o, "train.steps=many"], [f"--set {o}: not valid YAML", "train.steps = 'many'"]) for o in BROKEN),
    ],
)
def test_every_violation_is_reported_at_once(tmp_path, sections, overrides, found):
    lines = violations(write(tmp_path, **sections), overrides).splitlines()
    assert [text for text in found if any(text in line for line in lines)] == found
    assert len(lines) == len(found)


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("objective=dppo", "objective = 'dppo': a section of settings, not a value; write e.g. objective.name"),
        ("data.more=[1]", "data.more.0 = 1: a section of settings, not a value; write e.g. data.more.0.path"),
        ("learning_rate=1", "did you mean optimizer.lr?"),
        ("train.batch_size=8", "did you mean rollout.prompts_per_step?"),
        ("objective.clip_range=0.2", "did you mean objective.settings.delta (of a ratio, epsilon_low"),
        ("algorithm.kl_coef=0.1", "here kl_coef is objective.settings.reference_kl_coefficient"),
        ("actor_rollout_ref.actor.optim.lr=1", "here lr is optimizer.lr"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=2", "parallel.tensor (of engines: engine.tensor_par"),
        ("mini_batch_size=8", "did you mean train.updates_per_step (a count; each sequence is trained on once)?"),
        ("optimizer.beta=0.9", "did you mean optimizer.beta"),
        ("optimizer.betas=[0.9,0.95]", "did you mean optimizer.beta1 and optimizer.beta2?"),
        ("optimizer.momentum=0.9", "unknown setting; valid here: lr, "),
        ("lora.r=8", "lora: unknown setting; here r is model.lora.r"),
        ("dtype=bf16", "did you mean model.dtype or engine.dtype?"),
        ("modle.path=x", "did you mean model?"),
        ("lerning_rate=1", "did you mean optimizer.lr?"),
        ("rollout.stop=x", "did you mean rollout.stop_token_ids (token ids, no texts)?"),
        ("actor_rollout_ref.x=1", "actor_rollout_ref: unknown setting; valid here: run, model"),
        ("algorithm.gamma=1", "algorithm: unknown setting; did you mean objective?"),
        ("trainer.total_epochs=3", "trainer: unknown setting; here total_epochs is train.steps"),
        ("custom_reward_function={path: x, name: y}", "did you mean reward.name?"),
        ("objective.settings.clip=0.2", "objective dppo_binary_tv has delta instead"),
        ("objective={name: ppo, settings: {clip_range: 0.2}}", "ppo has epsilon_low and epsilon_high instead"),
        ("objective={name: pg_is, settings: {clip_range: 0.2}}", "= 0.2: objective pg_is has no trust region; remove"),
        ("weight_sync.transport=ipc", "= 'ipc': does not exist: CUDA IPC needs the whole weights in the memory of the"),
        ("rollout.temperature=0", "would be equal, without an advantage; use e.g. 1.0"),
        ("model.lora.targets=all-linear", "remove the setting"),
        ("data.prompt_template=Question: {prompt}", "must be text, but ': ' makes it a section"),
        ("objective.settings.clip_high=0.2", "did you mean objective.settings.epsilon_high?"),
        ("objective.settings.advantage=x", "did you mean objective.advantage?"),
        ("rollout.over_sampling_batch_size=64", "did you mean rollout.dynamic_sampling?"),
        ("objective.use_tis=true", "did you mean objective.settings.mismatch?"),
        (
            "objective.name=reinforce_pp",
            "did you mean objective.name (ppo, with objective.advantage batch_normalised)?",
        ),
        ("objective.name=GRPO", "did you mean 'grpo'"),
        ("objective.settings=3", "objective.settings = 3: must be a section of settings; write {NAME: VALUE}"),
        ("model.path=3", 'model.path = 3: must be text; put it in quotes, "3"'),
        ("model.path=~/m", "model.path = '~/m': ~ and $NAME are not replaced in a config; write the whole path"),
        ("rollout.stop_token_ids=3", "must be a list; write [3]"),
        ("objective.settings.kl_coef=1", "unknown here; did you mean objective.settings.reference_kl_coefficient ("),
        ("engine.extra_args=--a --b", "= '--a --b': must be a list; write [--a, --b]"),
        ("engine.extra_args=[--x, 64]", 'engine.extra_args.1 = 64: must be text; put it in quotes, "64"'),
    ],
)
def test_a_name_of_another_trainer_leads_to_ours(tmp_path, override, meant):
    found = violations(write(tmp_path), [override])
    assert meant in found
    assert len(found.splitlines()) == 1


def test_the_line_of_another_trainers_names_is_whole_whatever_else_is_wrong(tmp_path):
    names = [name for row in load._ROWS[:24] for name in row.rpartition(": ")[2].split()[:1]]
    wrong = {"rollout": {"temperature": "hot" * 200}, "engine": {f"setting_{n}": "x" * 300 for n in range(30)}}
    with pytest.raises(ConfigError) as raised:
        load_config(write(tmp_path, actor_rollout_ref=dict.fromkeys(names, 1), **wrong))
    (line,) = (line for line in str(raised.value).splitlines() if "actor_rollout_ref" in line)
    assert len(line) > 600
    assert [name for name in names if f" {name} is {load._ALIASES[name]}" not in line] == []


def test_every_name_of_another_trainer_leads_to_a_setting():
    """Every name has one target, and every setting of a target is in the schema."""
    rows = [row.rpartition(": ")[2] for row in load._ROWS]
    names = [name for row in [*rows, *_OTHER_NAMES.values()] for name in row.split()]
    assert len(names) == len(set(names)) == len(load._ALIASES) > 150
    for target in load._ALIASES.values():
        for dotted in re.sub(r" \(.*\)$", "", target).split(" and "):
            *sections, leaf = dotted.split(".")
            if sections == ["objective", "settings"]:
                assert leaf in AXES, dotted
                continue
            tree = Config
            for section in sections:
                tree = tree.model_fields[section].annotation
            assert leaf in tree.model_fields, dotted


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ("train c.yaml --lr 1", "No such option: --lr (Possible options: --help, --set optimizer.lr=VALUE)"),
        ("train c.yaml --max-steps=3", "--set train.steps=VALUE)"),
        ("validate c.yaml --colour 1", "--set section.key=VALUE)"),
        ("train c.yaml optimizer.lr=1e-5 steps=4", "write --set optimizer.lr=1e-5; write --set train.steps=4"),
        ("train c.yaml --resum", "No such option: --resum (Possible options: --resume, --set section.key=VALUE)"),
        ("status run --lr 1", "No such option: --lr (Possible options: --help)"),
        ("train c.yaml --set lr 1e-5", "unexpected extra argument(s) (1e-5); write --set optimizer.lr=VALUE"),
        ("eval c.yaml --url localhost:1", "localhost:1: must be http://HOST:PORT, with a port of at most 65535"),
        ("train --config c.yaml", "No such option: --config (Possible options: CONFIG without an option)"),
    ],
)
def test_a_setting_without_its_option_is_answered_with_it(arguments, meant):
    said = CliRunner().invoke(app, arguments.split(), env={"TERMINAL_WIDTH": "300"})
    assert said.exit_code == 2
    assert f"{meant} " in said.output


def test_overrides_are_typed_like_the_file(tmp_path):
    config = load_config(
        write(tmp_path), ["optimizer.lr=1e-4", "engine.urls=[http://a:1/]", "objective.settings={delta: 2e-1}"]
    )
    assert config.optimizer.lr == 1e-4
    assert config.engine.urls == ("http://a:1",)
    assert config.objective.settings == {"delta": 0.2}  # a number in a free mapping, too


def test_repeated_keys_are_refused_with_their_lines(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "run: {dir: x}\nmodel: {path: m}\ndata: {train: t}\ntrain:\n  steps: 1\n  steps: 2\nrun: {seed: 3}\n"
    )
    found = violations(path, ["objective.settings={delta: 0.1, delta: 0.2}"])
    assert "run: given in lines 1, 7" in found
    assert "train.steps: given in lines 5, 6" in found
    assert len(found.splitlines()) == 3  # run.dir of the first section is not missing
    assert "--set objective.settings={delta: 0.1, delta: 0.2}: delta: given in lines 1, 1" in found


def test_a_file_without_a_tree_of_settings_is_named(tmp_path):
    assert "no such file" in violations(tmp_path / "absent.yaml")
    path = tmp_path / "config.yaml"
    for text, found in (
        ("run: {dir: [", ["not valid YAML"]),
        ("- a list", ["must be a mapping"]),
        ("run: {dir: x}", ["model: required, not set; set model.path", "train: required, not set; set train.steps"]),
    ):
        path.write_text(text)
        assert all(line in violations(path) for line in found)
    for name, text in (("c.toml", '[run]\ndir = "x"\n'), ("reward.py", "def reward(text): return 1.0\n")):
        (tmp_path / name).write_text(text)
        assert "; pass a YAML config, e.g. examples/quickstart/config.yaml" in violations(tmp_path / name)
    (tmp_path / "run.json").write_text('{"run": {"dir": "x"}}')
    assert "pass a YAML config" not in violations(tmp_path / "run.json")


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"rollout": {"top_p": 0.0}}, "rollout.top_p = 0.0: no token is left"),
        ({"rollout": {"min_p": 0.1}}, "rollout.min_p = 0.1: on a flat distribution it keeps most of the vocabulary"),
        ({"engine": {"kind": "sglang"}, "rollout": {"min_p": 0.1, "top_k": 9}}, "draws with seeds or with min_p"),
        ({"engine": {"logprobs_mode": "raw_logprobs"}}, "engine.logprobs_mode = raw_logprobs"),
        ({"rollout": {"max_response_tokens": 3073}, "engine": ENGINE}, "engine.max_model_len = 4096: less than data."),
        (
            {"data": {"train": "t", "eval": "e"}, "eval": {"max_response_tokens": 3073}, "engine": ENGINE},
            "= 1024 + eval.max_response_tokens = 3073",
        ),
        ({"profile": {"ranks": [0, 1]}}, "profile.ranks = [1]: parallel.world_size = 1 has no such ranks"),
        ({"train": {"updates_per_step": 3}}, "does not divide rollout.prompts_per_step"),
        ({"parallel": {"world_size": 3, "tensor": 2}}, "not a multiple of tensor x pipeline x context"),
        ({"parallel": {"sequence": True}}, "needs parallel.tensor > 1"),
        ({"parallel": {"virtual_pipeline": 2}}, "needs parallel.pipeline > 1"),
        ({"engine": {"quantization": "fp8_block", "dtype": "fp32"}}, "engine.dtype = fp32"),
        ({"engine": {"quantization": "fp8_block", "kind": "sglang", "urls": ["http://a:1"]}}, "excludes engine.urls"),
        ({"weight_sync": {"transport": "broadcast"}, "parallel": SENDERS}, "256 ranks send weights"),
        (
            {"rollout": {"on_update": "wait"}, "engine": {"request_timeout_s": 900}, "weight_sync": {"timeout_s": 300}},
            "rollout.on_update = wait: an update waits weight_sync.timeout_s = 300 s",
        ),
        (
            {"rollout": {"routing_replay": True, "max_staleness": 1}, "engine": {"kind": "sglang"}},
            "rollout.on_update = keep: SGLang returns the experts of a request's last prefill",
        ),
        ({"optimizer": {"min_lr": 1.0, "decay": "linear"}}, "not below optimizer.lr"),
        ({"acceptance": {"share": 0.5}}, "acceptance.bound = null"),
        ({"acceptance": {"bound": 0.1}, "objective": {"name": "nll"}}, "supervised training has none"),
        ({"rollout": {"temperature": 0}}, "rollout.temperature = 0"),
        ({"model": {"path": "m", "dtype": "fp32", "fp8": "tensorwise"}}, "set model.dtype to bf16"),
        ({"model": {"path": "m", "fp8": "tensorwise", "layers": "local"}}, "local layers have no FP8"),
        ({"model": {"path": "m", "fp32_head": True, "logits": "fused"}}, "set model.logits to stored"),
    ],
)
def test_a_setting_that_would_be_silently_wrong_is_refused(tmp_path, sections, expected):
    assert expected in violations(write(tmp_path, **sections))


@pytest.mark.parametrize(
    ("sections", "tolerance"),
    [
        ({}, 0.3),
        ({"model": {"path": "m", "dtype": "fp32"}, "engine": {"dtype": "bf16"}}, 0.3),
        ({"model": {"path": "m", "dtype": "fp32"}}, 1e-4),
        ({"engine": {"quantization": "fp8_block"}}, 1.0),
        ({"model": {"path": "m", "fp8": "blockwise"}}, 1.0),
        ({"engine": {"exact": True}}, 0.0),
        ({"weight_sync": {"probe_tolerance": 1e-2}}, 1e-2),
    ],
)
def test_the_probes_tolerance_follows_from_the_precisions(tmp_path, sections, tolerance):
    assert load_config(write(tmp_path, **sections)).probe_tolerance == tolerance


@pytest.mark.parametrize(
    "sections",
    [
        {"rollout": {"routing_replay": True, "max_staleness": 1}},
        {"rollout": {"routing_replay": True, "max_staleness": 1, "on_update": "abort"}, "engine": {"kind": "sglang"}},
        {"rollout": {"routing_replay": True}, "engine": {"kind": "sglang"}},
        {"rollout": {"max_response_tokens": 3072}},
        {"rollout": {"max_response_tokens": 8192}, "objective": {"name": "nll"}},
        {"rollout": {"max_response_tokens": 8192, "bank": "b"}},
        {"eval": {"max_response_tokens": 8192}},
        {"objective": {"name": "nll"}, "rollout": {"group_size": 1}},
        {"rollout": {"top_p": 0.9, "top_k": 20, "min_p": 0.05}},
    ],
)
def test_settings_that_rules_must_not_reject(tmp_path, sections):
    """Routes of the policy that sampled; lengths of an engine that is not used; sampling of supervised runs."""
    load_config(write(tmp_path, **sections))


def test_an_engine_follows_the_model_and_the_lengths_where_it_is_not_set():
    config = make_config(
        model={"path": "m", "dtype": "fp32"},
        data={"train": "t", "eval": "e", "max_prompt_tokens": 30},
        rollout={"max_response_tokens": 20},
        eval={"max_response_tokens": 25},
    )
    assert (config.engine.dtype, config.engine.max_model_len) == ("fp32", 55)
    assert config.probe_tolerance == 1e-4
    given = make_config(engine={"dtype": "fp16", "max_model_len": 4096})
    assert (given.engine.dtype, given.engine.max_model_len) == ("fp16", 4096)


@pytest.mark.parametrize("rank", [None, "0"])
def test_a_rank_started_by_hand_states_that_it_waits(tmp_path, monkeypatch, rank):
    monkeypatch.setattr("dppo_megatron.train.trainer.main.run_trainer", lambda *_, **__: None)
    done = CliRunner().invoke(app, ["trainer", str(write(tmp_path))], env={"RANK": rank})
    assert done.exit_code == 0
    assert ("`train` starts all of them" in done.output) == (rank is None)


def test_the_help_has_every_command_in_a_group():
    said = CliRunner().invoke(app, ["--help"], env={"TERMINAL_WIDTH": "200"}).stdout
    groups = [line.strip("╭─╮ ") for line in said.splitlines() if line.startswith("╭")]
    assert groups[:4] == ["Options", "Run", "Before a run", "During and after a run"]
    assert "Commands" not in groups
