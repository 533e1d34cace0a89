"""Run one of the two programs of `end_to_end.py` once on a cell, in its own processes, and read its records."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from end_to_end_task import LANGUAGE_MODEL, NUMBER, QUICKSTART, Cell
from step_time import step_parts

from dppo_megatron.report.tail import read_metrics, read_records

HERE = Path(__file__).parent
END_S = 60.0  # time for a program to end after SIGTERM
KV_CACHE_BYTES = 512 << 20


class SideFailed(RuntimeError):
    """The program failed, or finished no counted step in its time."""


@dataclass(frozen=True, slots=True)
class Step:
    seconds: float
    parts: dict[str, float]  # seconds
    response_tokens: float


@dataclass(frozen=True, slots=True)
class SideRun:
    """One run of one program."""

    startup_s: float  # from the start of the first process to the start of the first step
    steps: list[Step]  # all, in order
    warm: int  # number of first steps that are not counted
    accuracy: list[tuple[float, float]] = field(default_factory=list)  # seconds of earlier steps, greedy accuracy
    plain_s: float | None = None  # only transformers' forward and backward, if measured

    @property
    def counted(self) -> list[Step]:
        return self.steps[self.warm :]

    @property
    def step_s(self) -> float:
        return median(step.seconds for step in self.counted)

    @property
    def tokens_per_s(self) -> float:
        """Return the response tokens of a step per second."""
        return median(step.response_tokens / step.seconds for step in self.counted)

    @property
    def parts(self) -> dict[str, float]:
        """Return the median seconds of each part."""
        return {name: median(step.parts[name] for step in self.counted) for name in self.counted[0].parts}


def run_trl(
    cell: Cell, directory: Path, python: Path, steps: int, every: int, limit_s: float, threads: int | None
) -> SideRun:
    """Run TRL's GRPOTrainer with `end_to_end_trl.py`. Raises `SideFailed`."""
    output = _empty(directory / "trl")
    records = output / "records.jsonl"
    command = [python, HERE / "end_to_end_trl.py", cell.name, directory, records, "--steps", steps, "--every", every]
    started = _run(command, output / "log", limit_s, threads)
    found = read_records(records)
    rows = [record for record in found if "step_s" in record]
    _require(rows, cell, output / "log")
    known = ("sample", "score", "forward and backward", "optimizer")
    trained = [
        Step(
            row["step_s"],
            {**{name: row[name] for name in known}, "other": row["step_s"] - sum(row[name] for name in known)},
            row["response_tokens"],
        )
        for row in rows
    ]
    accuracies = {record["step"]: record["accuracy"] for record in found if "accuracy" in record}
    plain = next((record["plain_s"] for record in found if "plain_s" in record), None)
    startup = rows[0]["time"] - rows[0]["step_s"] - started
    return SideRun(startup, trained, cell.warm, _over_time(trained, accuracies), plain)


def run_ours(
    cell: Cell, directory: Path, steps: int, every: int, limit_s: float, threads: int | None, share: bool = True
) -> SideRun:
    """Run `dppo-megatron train` with an engine, an orchestrator and one rank. Raises `SideFailed`.

    share: compute a prompt once for its samples.
    """
    output = _empty(directory / "ours")
    config = output / "config.yaml"
    settings = our_config(cell, directory, output / "run", steps, every)
    if not share:
        settings["train"]["share_prefixes"] = False
    config.write_text(yaml.safe_dump(settings))
    started = _run([sys.executable, "-m", "dppo_megatron", "train", config], output / "log", limit_s, threads)
    records = read_metrics(output / "run" / "metrics.jsonl")
    generated = {record["step"]: record["time/generate_s"] for record in records if "time/generate_s" in record}
    rows = [r for r in records if "time/forward_backward_s" in r and r["step"] in generated]
    _require(rows, cell, output / "log")
    # The policy of version v is evaluated while the trainer waits for the batch of step v + 1.
    evaluated = {record["step"] + 1: record["time/eval_s"] for record in records if "time/eval_s" in record}
    trained = []
    for row in rows:
        parts = step_parts(row, generated[row["step"]], 0.0)
        parts["hand-over of rollouts"] -= evaluated.get(row["step"], 0.0)
        for name in ("evaluation", "checkpoint"):  # TRL's steps include neither
            del parts[name]
        tokens = row["rollout/response_tokens_mean"] * cell.sequences
        trained.append(Step(sum(parts.values()), parts, tokens))
    accuracies = {record["step"]: record["eval/accuracy"] for record in records if "eval/accuracy" in record}
    waited = evaluated.get(1, 0.0)  # the first evaluation is neither start-up nor step
    startup = rows[0]["time"] - trained[0].seconds - rows[0].get("time/checkpoint_s", 0.0) - waited - started
    return SideRun(startup, trained, cell.warm, _over_time(trained, accuracies))


def our_config(cell: Cell, directory: Path, run: Path, steps: int, every: int) -> dict[str, Any]:
    """Return a config of one rank on both cores: the engine is idle while the rank trains. The rest is the default."""
    longest = cell.prompt_tokens + cell.response
    data: dict[str, Any] = {"train": str(directory / "prompts.jsonl"), "max_prompt_tokens": cell.prompt_tokens}
    data["chat_template"] = cell.name == LANGUAGE_MODEL
    if every:
        data["eval"] = str(directory / "heldout.jsonl")
    rewards: dict[str, Any] = {
        QUICKSTART: {"name": "arithmetic"},
        LANGUAGE_MODEL: {"name": "regex", "settings": {"pattern": NUMBER}},
    }
    return {
        "run": {"dir": str(run)},
        "model": {"path": str(directory / "model"), "dtype": "fp32"},
        "objective": {"name": "dppo_binary_tv", "settings": {"delta": 0.2}},
        "data": data,
        "reward": rewards.get(cell.name, {"name": "end_to_end_task:even"}),
        "rollout": {
            "prompts_per_step": cell.prompts,
            "group_size": cell.samples,
            "max_response_tokens": cell.response,
        },
        "train": {"steps": steps, "updates_per_step": cell.updates, "micro_batch_tokens": cell.micro_batch_tokens},
        "optimizer": {"lr": cell.lr},
        "engine": {
            "dtype": "fp32",
            "max_model_len": max(64, longest),
            "max_num_seqs": cell.sequences,
            "kv_cache_bytes": KV_CACHE_BYTES,
        },
        "checkpoint": {"every": 0},
        "eval": {"every": every},
    }


def _run(command: list[Any], log: Path, limit_s: float, threads: int | None) -> float:
    """Run `command` to its end or for `limit_s`, and return the Unix time of its start.

    threads is OMP_NUM_THREADS; with None it is unset, and each process decides. Raises `SideFailed` with the last lines
    of the log.
    """
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (HERE.parent, HERE)))
    environment["HF_HUB_OFFLINE"] = "1"
    started = time.time()
    with log.open("w") as file:
        child = subprocess.Popen(list(map(str, command)), stdout=file, stderr=subprocess.STDOUT, env=environment)
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = 0  # its records so far count
        finally:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
                try:
                    child.wait(END_S)
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()
    if code:
        raise SideFailed(f"{command[1]} ended with {code}:\n{_tail(log)}")
    return started


def _require(rows: list[dict[str, Any]], cell: Cell, log: Path) -> None:
    if len(rows) <= cell.warm:
        raise SideFailed(f"{cell.name}: {len(rows)} steps in its time, {cell.warm} of them to warm up\n{_tail(log)}")


def _over_time(steps: list[Step], accuracies: dict[int, float]) -> list[tuple[float, float]]:
    return [(sum(s.seconds for s in steps[:step]), accuracy) for step, accuracy in sorted(accuracies.items())]


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-25:])


def _empty(directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def describe(run: SideRun) -> dict[str, Any]:
    """Return the figures of a run as JSON."""
    return {
        "startup_s": run.startup_s,
        "step_s": [step.seconds for step in run.counted],
        "parts": run.parts,
        "tokens_per_s": run.tokens_per_s,
        "accuracy": run.accuracy,
        "plain_s": run.plain_s,
    }
