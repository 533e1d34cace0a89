"""Starts runs from the command line, as a user does, and reads run files."""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from dppo_megatron.rollout.engines.guard.asgi import ROOTS_VARIABLE
from tests.support.commands import Command

STEPS, GROUPS, SAMPLES = 4, 4, 4
TIMEOUT_S = 900


@dataclass
class Engine:
    url: str
    process: Command
    directory: Path

    def end(self) -> None:
        end_session(self.process)


def config_tree(task: Path, run_dir: Path, *, urls: tuple[str, ...] = ()) -> dict:
    """Return a config with four steps of four groups of four. It uses every part of a run, in seconds on two cores."""
    return {
        "run": {"dir": str(run_dir), "stall_timeout_s": 120},
        "model": {"path": str(task / "random_model"), "dtype": "fp32"},
        "parallel": {"world_size": 2, "tensor": 2, "timeout_s": 120},
        "objective": {"name": "dppo_binary_tv", "settings": {"delta": 0.2}},
        # A random policy is never right, so the reward must be for something that it sometimes does.
        "reward": {"name": "tests.support.rewards:even_digits"},
        "data": {"train": str(task / "train.jsonl"), "eval": str(task / "heldout.jsonl"), "max_prompt_tokens": 16},
        "rollout": {"prompts_per_step": GROUPS, "group_size": SAMPLES, "max_response_tokens": 4},
        "train": {"steps": STEPS, "updates_per_step": 2},
        "optimizer": {"lr": 1e-3},
        "engine": {
            **{"dtype": "fp32", "max_model_len": 64, "kv_cache_bytes": 1 << 28, "urls": list(urls)},
            **({"secret_file": str(task / "secret")} if urls else {}),  # the secret of `start_engine`
        },
        "checkpoint": {"every": 2},
    }


def write_task(directory: Path, *, heldout: int) -> Path:
    """Write the quickstart's task with `heldout` held-out sums."""
    from make_task import make_task

    make_task(directory, seed=1)
    rows = directory / "heldout.jsonl"
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:heldout]))
    (directory / "secret").write_text("of the engines that several runs share")
    return directory


def write_config(tree: dict, path: Path) -> Path:
    path.write_text(yaml.safe_dump(tree))
    return path


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of a test process that prints all thread stacks on SIGABRT."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **variables}


def start(*arguments: str | Path, output: Path, real: bool = False) -> Command:
    return Command(*arguments, output=output, errors=output, variables=environment(), session=True, real=real)


def run(*arguments: str | Path, check: bool = True, real: bool = False) -> subprocess.CompletedProcess:
    """Run a command. After a timeout, raise with the stacks of all processes and the ends of logs."""
    with tempfile.TemporaryDirectory() as directory:
        output, errors = Path(directory, "stdout"), Path(directory, "stderr")
        process = Command(*arguments, output=output, errors=errors, variables=environment(), real=real)
        try:
            process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            for member in [*descendants(process), psutil.Process(process.pid)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.send_signal(signal.SIGABRT)
            process.wait()
            logs = [
                log
                for line in output.read_text().splitlines()
                for log in Path(line.rpartition("logs in ")[2]).glob("*.log")
            ]
            ends = "\n".join(f"== {log}\n{log.read_text()[-12000:]}" for log in logs)
            said = f"{output.read_text()}\n{errors.read_text()}"
            raise AssertionError(f"not over after {TIMEOUT_S} s\n{said}\n{ends}") from None
        done = subprocess.CompletedProcess(process.args, process.returncode, output.read_text(), errors.read_text())
    assert not check or done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


def engine_tree(task: Path, directory: Path, **settings: object) -> dict:
    """Return the config of an engine that runs share: they know the secret, and the engine loads their weights."""
    tree = config_tree(task, directory)
    tree["engine"] |= {"secret_file": str(task / "secret"), "env": {ROOTS_VARIABLE: str(directory.parent)}, **settings}
    return tree


def start_engine(task: Path, directory: Path, **settings: object) -> Engine:
    """Start an engine. `settings` belong to the section `engine`."""
    config = write_config(engine_tree(task, directory, **settings), directory / "config.yaml")
    process = start("engine", config, output=directory / "engine.out")
    service = directory / "services" / "engine-0.json"
    wait_until(service.exists, "the engine", process, directory / "engine.out")
    return Engine(json.loads(service.read_text())["url"], process, directory)


def wait_until(condition, what: str, process: Command, output: Path, timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        shown = output.read_text() if output.exists() else ""
        assert process.poll() is None, f"ended with {process.returncode} while waiting for {what}:\n{shown}"
        assert time.monotonic() < deadline, f"timed out waiting for {what}:\n{shown}"
        time.sleep(0.02)


def end_session(process: Command) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def descendants(process: Command) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def records(run_dir: Path) -> list[dict]:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def steps_done(run_dir: Path) -> list[int]:
    """Return the steps with a training record, in file order."""
    return [r["step"] for r in records(run_dir) if "time/step_s" in r]


def train_to_end(tree: dict) -> list[dict]:
    """Train by the command, and return the step records. Checks that all steps are there, with gradients."""
    run_dir = Path(tree["run"]["dir"])
    run("train", write_config(tree, run_dir.with_suffix(".yaml")))
    assert steps_done(run_dir) == list(range(1, STEPS + 1))
    trained = [r for r in records(run_dir) if "time/step_s" in r]
    assert all(r["train/grad_norm"] > 0 for r in trained)
    return trained


def weights_digest(run_dir: Path) -> str:
    """Return the digest of the final model's tensors, in name order."""
    from safetensors import safe_open

    digest = hashlib.sha256()
    for path in sorted((run_dir / "model").glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            for name in sorted(file.keys()):
                digest.update(name.encode() + file.get_tensor(name).tobytes())
    return digest.hexdigest()
