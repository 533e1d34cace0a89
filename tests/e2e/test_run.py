"""A run end to end, ended in every way a run can end, and continued."""

import shutil
import signal
import stat
import subprocess
import sys
import time

import psutil
import pytest

from dppo_megatron.bank import BankReader
from tests.support import runs

STEPS = 10  # so many that a run can be ended in each of two lives


def config_tree(task, run_dir, *, urls=()):
    tree = runs.config_tree(task, run_dir, urls=urls)
    tree["train"]["steps"] = STEPS
    tree["optimizer"]["lr"] = 2e-4  # so slow that no step is without a reward to learn from
    return tree


@pytest.fixture(scope="module")
def uninterrupted(task, engine, tmp_path_factory):
    """An undisturbed run with processes as a user starts them, which every resumed one must equal."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    config = runs.write_config(config_tree(task, directory / "run", urls=(engine.url,)), directory / "c.yaml")
    runs.run("train", config, real=True)
    return directory / "run"


def check_complete(run_dir, reference):
    """Every step trained once, every prompt sampled once, and the weights those of an undisturbed run."""
    assert runs.steps_done(run_dir) == list(range(1, STEPS + 1))
    reader = BankReader(run_dir / "bank")
    assert reader.refresh() == STEPS * runs.GROUPS
    assert sorted(e.position for e in reader.entries(0, STEPS * runs.GROUPS)) == list(range(STEPS * runs.GROUPS))
    assert runs.weights_digest(run_dir) == runs.weights_digest(reference)


@pytest.mark.slow
def test_a_run_trains_publishes_evaluates_and_reports(uninterrupted):
    everything = runs.records(uninterrupted)
    assert [r["step"] for r in everything if "eval/accuracy" in r] == [0, STEPS]
    probes = [r["probe/max_abs_logprob_difference"] for r in everything if "probe/max_abs_logprob_difference" in r]
    assert len(probes) == STEPS + 1
    assert max(probes) < 1e-4
    trained = [r for r in everything if "time/step_s" in r]
    assert len(trained) == STEPS
    assert all(r["mismatch/max_abs_logprob_difference"] < 1e-4 for r in trained)
    assert all(r["train/grad_norm"] > 0 for r in trained)
    assert (uninterrupted / "report" / "curves.png").stat().st_size > 10_000
    head = (uninterrupted / "logs" / "trainer-0.log").read_text().splitlines()[:10]
    assert any("dppo_binary_tv" in line for line in head)
    assert any("tensor 2" in line for line in head)
    assert (uninterrupted / "config.yaml").exists()


@pytest.mark.slow
def test_a_run_trains_publishes_and_deletes_rollouts_that_no_checkpoint_needs(task, engine, uninterrupted, tmp_path):
    """It ends with the same bits, and so does a resume from the older of the checkpoints that are kept."""
    tree = config_tree(task, tmp_path / "run", urls=(engine.url,))
    tree["checkpoint"] = {"every": 1, "keep": 2, "keep_rollouts": 0}
    config = runs.write_config(tree, tmp_path / "c.yaml")
    runs.run("train", config)
    check_complete(tmp_path / "run", uninterrupted)
    left = sorted(path.name for path in (tmp_path / "run/bank").glob("*.bin"))
    assert "segment-000000.bin" not in left
    assert left[-1] == f"segment-{STEPS - 1:06d}.bin"
    shutil.rmtree(tmp_path / "run/checkpoints" / f"step-{STEPS:06d}")
    runs.run("train", config, "--resume")
    check_complete(tmp_path / "run", uninterrupted)


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_by_a_running_engine_as_the_final_model_is(task, engine, uninterrupted, tmp_path):
    """Without --url the command starts an engine of its own."""
    config = runs.write_config(config_tree(task, uninterrupted, urls=(engine.url,)), tmp_path / "c.yaml")
    checkpoint, shown = uninterrupted / "checkpoints" / f"step-{STEPS:06d}", []
    for model, options in ((uninterrupted / "model", ()), (checkpoint, ("--url", engine.url))):
        (line,) = runs.run("eval", config, "--model", model, *options).stdout.splitlines()[-1:]
        shown.append(line.removeprefix(f"{model}: "))
    last = next(r for r in runs.records(uninterrupted) if r.get("step") == STEPS and "eval/accuracy" in r)
    assert last["eval/reward_mean"] == last["eval/accuracy"]
    assert shown == [f"{16 * last['eval/accuracy']:.0f} of 16 right"] * 2


@pytest.mark.slow
def test_the_secret_is_in_no_file_of_a_run_or_of_its_engine(task, engine, uninterrupted):
    secret = (task / "secret").read_bytes()
    files = [path for directory in (uninterrupted, engine.directory) for path in directory.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert [path for path in files if secret in path.read_bytes()] == []
    assert stat.S_IMODE(uninterrupted.stat().st_mode) == 0o700


def start_until_a_step(config, run_dir, output, *options):
    """Starts a run, or goes on with it, and returns when it has trained a step."""
    begun = time.time()
    process = runs.start("train", config, *options, output=output)

    def trained():
        return any(r["time"] > begun for r in runs.records(run_dir) if "time/step_s" in r)

    runs.wait_until(trained, "a step", process, output)
    return process


def still_there(processes):
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def shown(output):
    return output.read_text() if output.exists() else ""


@pytest.mark.slow
def test_ended_by_a_dead_engine_then_by_a_signal_it_goes_on_and_equals_an_undisturbed_run(
    task, engine, uninterrupted, tmp_path
):
    """The run starts its own engine, which the launcher would restart by default. It goes on with the shared one, and
    ends by SIGTERM. Other processes of a run are killed in tests/faults/test_kill_matrix.py."""
    run_dir, outputs = tmp_path / "run", [tmp_path / f"out-{life}" for life in range(2)]
    tree = config_tree(task, run_dir)
    tree["engine"]["restarts"] = 0
    process = start_until_a_step(runs.write_config(tree, tmp_path / "own.yaml"), run_dir, outputs[0])
    others = runs.descendants(process)
    next(p for p in others if "api_server" in " ".join(p.cmdline())).kill()
    assert process.wait(60) == 1
    assert not still_there(others)
    assert "engine-0 ended" in shown(outputs[0])
    assert "SIGKILL" in shown(outputs[0])

    config = runs.write_config(config_tree(task, run_dir, urls=(engine.url,)), tmp_path / "c.yaml")
    process = start_until_a_step(config, run_dir, outputs[1], "--resume")
    others = runs.descendants(process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert not still_there(others)
    assert "--resume" in shown(outputs[1])

    runs.run("train", config, "--resume")
    check_complete(run_dir, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--set", "rollout.group_size=8"], "already contains a run; pass --resume"),
        (["--set", "rollout.group_size=8", "--resume"], "rollout.group_size = 8: the run was started with 4"),
    ],
)
def test_the_directory_of_another_run_is_refused(task, engine, uninterrupted, tmp_path, options, problem):
    config = runs.write_config(config_tree(task, uninterrupted, urls=(engine.url,)), tmp_path / "c.yaml")
    refused = runs.run("train", config, *options, check=False)
    assert refused.returncode == 2
    assert problem in refused.stderr


@pytest.mark.slow
def test_an_engine_that_dies_while_starting_shows_its_last_lines(task, tmp_path):
    tree = config_tree(task, tmp_path / "run")
    tree["engine"]["extra_args"] = ["--no-such-flag"]
    result = runs.run("train", runs.write_config(tree, tmp_path / "c.yaml"), check=False)
    assert result.returncode == 1
    assert "no-such-flag" in result.stdout


def test_commands_explain_themselves():
    for name in ("train", "trainer", "orchestrator", "engine", "eval", "validate", "objectives", "report"):
        assert "--help" in runs.run(name, "--help").stdout


def test_objectives_and_vocab_parallel_import_no_package_of_the_trainer():
    """Only the packages of `pip install .`, none of the trainer's environment."""
    code = (
        "import sys, dppo_megatron.objectives.on_tensors, dppo_megatron.vocab_parallel; "
        "heavy = {'megatron', 'transformers', 'vllm', 'pydantic', 'yaml', 'jaxtyping'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], env=runs.environment(), check=True)


@pytest.mark.slow
def test_a_run_may_end_without_a_last_checkpoint(task, tmp_path):
    """It has its model, and a resume finds it complete. Supervised training needs no engine."""
    tree = {name: config_tree(task, tmp_path / "run")[name] for name in ("run", "model", "optimizer")}
    tree |= {"objective": {"name": "nll"}, "data": {"train": str(task / "warmup.jsonl")}, "train": {"steps": 2}}
    tree |= {"rollout": {"prompts_per_step": 4}, "checkpoint": {"every": 1, "final": False}}
    config = runs.write_config(tree, tmp_path / "c.yaml")
    runs.run("train", config)
    assert (tmp_path / "run/model/config.json").exists()
    assert (tmp_path / "run/checkpoints/latest").read_text().endswith("-000001")
    assert "2 steps are done, train.steps = 2; raise it" in runs.run("train", config, "--resume").stdout
