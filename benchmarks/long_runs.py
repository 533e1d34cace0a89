"""Compare what a resume, a rank's memory and a group cost late in a run and early in it.

    python benchmarks/long_runs.py [--steps 200 20000] [--segments 200 10000] [--directory /dev/shm] [--out FILE]

The run directory is made up: metrics of `--steps` steps, and a bank of `--segments` segments. Nothing trains. Each role
is a process of its own, as in a run:

- driver: checks config and run directory, then examines and shows the earlier steps, as `train --resume` does
- orchestrator: loads tokenizer and prompts, opens the bank and starts the draft index, then writes groups and finds the
  earlier samples of prompts
- rank 0 and rank 1: open trackers and bank, then read the batches of these groups; rank 0 also loads tokenizer and
  prompts, and removes the records of the steps after the checkpoint

Times are seconds of CPU, because other programs may use the cores. The resume is from the process's start to its
first group, with imports; a group is the mean of `--groups`. A real resume also starts engines and loads a model,
meanwhile on other cores, so its ratio is smaller. Rounds alternate the two sizes, and a figure is the smallest of the
rounds. Memory is the highest of a process. The exit code is the number of ratios above 1.2.
"""

from __future__ import annotations

import argparse
import datetime
import io
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

from gpu_machine import ROOT, commit

sys.path.insert(0, str(ROOT))
LIMIT = 1.2
REPEATED = 5  # steps after the last checkpoint, which the resumed run repeats
PER_STEP, SAMPLES, TOKENS = 8, 8, 512  # a measured step's groups, their samples, and the tokens of each
ROLES = ("driver", "orchestrator", "rank 0", "rank 1")


def write_run(root: Path, steps: int, segments: int) -> None:
    """Write the config, the metrics of `steps` steps, and a bank of `segments` segments of one small group."""
    import numpy as np
    from transformers import AutoConfig, AutoModelForCausalLM

    from dppo_megatron.bank import BankWriter
    from dppo_megatron.config import save_resolved
    from dppo_megatron.report.names import METRICS
    from dppo_megatron.run_dir import RunDir
    from tests.support.configs import make_config
    from tests.support.tokenizers import save_character_model

    model = save_character_model(root / "model")
    shape = {
        **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 128, "head_dim": 16},
        **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "max_position_embeddings": 4096},
    }
    (model / "config.json").write_text(json.dumps(shape))
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)
    data = root / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{row}", "answer": f"{row}"}) + "\n" for row in range(50)))
    config = make_config(
        run={"dir": str(root / "run")},
        model={"path": str(model)},
        data={"train": str(data)},
        rollout={"prompts_per_step": PER_STEP, "group_size": SAMPLES, "max_response_tokens": TOKENS},
        train={"steps": steps + 1000, "micro_batch_tokens": 1 << 14},
    )
    run = RunDir(root / "run")
    run.root.mkdir()
    save_resolved(config, run.config)
    names = [metric.name for metric in METRICS]
    rng = np.random.default_rng(0)

    def record(step: int, *metrics: str) -> str:
        values = dict(zip(metrics, rng.random(len(metrics)).tolist(), strict=True))
        return json.dumps({"step": step, "time": float(step), **values}) + "\n"

    with run.metrics.open("w") as file, run.rollout_metrics.open("w") as rollouts:
        for step in range(1, steps + REPEATED + 1):
            sampling = record(step, *(name for name in names[60:] if name.startswith(("rollout/", "engine/"))))
            evaluation = record(step, "eval/accuracy", "eval/reward_mean") if step % 100 == 0 else ""
            rollouts.write(sampling + evaluation)
            file.write(sampling + record(step, *names[:60]) + evaluation)
    with BankWriter(run.bank, 1, fsync=False) as bank:
        for position in range(segments):
            bank.append(make_group(position, 1, 4))


def make_group(position: int, samples: int, tokens: int):
    import numpy as np

    from dppo_megatron.types import Prompt, Rollout, RolloutGroup

    rng = np.random.default_rng(position)
    rollouts = tuple(
        Rollout(
            token_ids=rng.integers(0, 128, tokens).astype(np.int32),
            rollout_logprob=-rng.random(tokens, np.float32),
            versions=np.zeros(tokens, np.int32),
            finish_reason="stop",
        )
        for _ in range(samples)
    )
    rewards = np.resize(np.array([0, 1], np.float32), samples)
    prompt = Prompt(position, position % 50, np.arange(32, dtype=np.int32), "", "")
    return RolloutGroup(prompt, rollouts, rewards, rewards < 0, temperature=1.0)


def drive(root: Path, groups: int) -> Iterator[None]:
    from dppo_megatron import cli  # noqa: F401, what the command imports
    from dppo_megatron.config import read_config
    from dppo_megatron.report.console import ProgressView
    from dppo_megatron.report.doctor import Examination
    from dppo_megatron.report.tail import sparse
    from dppo_megatron.run.checks import check_run_dir, preflight
    from dppo_megatron.run.launch.local_run import finished
    from dppo_megatron.run_dir import RunDir

    config = read_config(root / "run" / "config.yaml")
    check_run_dir(config, "config.yaml", resume=True)
    assert not finished(config)
    preflight(config, "config.yaml")
    before = time.process_time()
    Examination(config.run.dir, sparse).advance(rollouts=False)
    ProgressView(config.train.steps, io.StringIO()).poll(RunDir(config.run.dir).metrics)
    print(f"  driver: {time.process_time() - before:.2f} s for earlier metrics", file=sys.stderr)
    yield


def orchestrate(root: Path, groups: int) -> Iterator[None]:
    from dppo_megatron.bank import BankWriter, EarlierSamples
    from dppo_megatron.config import read_config
    from dppo_megatron.data.prompts import training_prompts
    from dppo_megatron.data.tokenizer import load_tokenizer
    from dppo_megatron.report.tail import evaluated
    from dppo_megatron.rollout.orchestrator import main  # noqa: F401
    from dppo_megatron.run_dir import RunDir

    config, run = read_config(root / "run" / "config.yaml"), RunDir(root / "run")
    training_prompts(config, load_tokenizer(config.model.path))
    evaluated(run.rollout_metrics)
    before = time.process_time()
    with BankWriter(run.bank, PER_STEP, fsync=False) as bank:
        earlier = EarlierSamples(bank.reader())
        begin = max(bank.done_positions()) + 1
        earlier.samples(make_group(begin, 1, 1).prompt)
        print(f"  orchestrator: {time.process_time() - before:.2f} s for the bank", file=sys.stderr)
        made = [make_group(begin + number, SAMPLES, TOKENS) for number in range(groups)]
        yield
        for group in made:
            earlier.samples(group.prompt)
            bank.append(group)


def train(rank: int, root: Path, groups: int) -> Iterator[None]:
    from dppo_megatron.bank import BankReader
    from dppo_megatron.config import read_config
    from dppo_megatron.data.prompts import training_prompts
    from dppo_megatron.data.tokenizer import load_tokenizer
    from dppo_megatron.objectives import build_objective
    from dppo_megatron.run_dir import RunDir
    from dppo_megatron.train.trainer import main  # noqa: F401
    from dppo_megatron.train.trainer.batches import BankBatches
    from dppo_megatron.train.trainer.recorder import RankZeroRecorder

    config, run = read_config(root / "run" / "config.yaml"), RunDir(root / "run")
    done = config.train.steps - 1000
    if rank == 0:  # for the weight check
        training_prompts(config, load_tokenizer(config.model.path))
    objective = build_objective(config.objective.name, **config.objective.settings)
    source = BankBatches(config, BankReader(run.bank), objective, rank, 2, ("core",))
    with RankZeroRecorder(config, rank, done, str) as recorder:
        recorder.log_missing(done, {})
        recorder.log(done, {"publish/bytes": 1.0})  # of the first publish
        source.ready(0)
        yield
        last = source._reader.num_groups // PER_STEP
        for step in range(last - groups // PER_STEP, last):
            source.read(step)
            recorder.log(done + 1 + step, {"train/loss": 0.5})


def measure(role: str, root: Path, groups: int) -> dict[str, float]:
    """Run one role in a new process; return CPU seconds to its first group and per group, and its highest memory."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_role, args=(role, root, groups, there))
    process.start()
    there.close()
    found = here.recv()
    process.join()
    return found


def _role(role: str, root: Path, groups: int, connection) -> None:
    work: dict[str, Callable[[], Iterator[None]]] = {
        "driver": lambda: drive(root, groups),
        "orchestrator": lambda: orchestrate(root, groups),
        "rank 0": lambda: train(0, root, groups),
        "rank 1": lambda: train(1, root, groups),
    }
    steps = work[role]()
    next(steps)
    ready = time.process_time()
    next(steps, None)
    each = (time.process_time() - ready) / groups
    # Not ru_maxrss, which begins with the memory of the parent.
    highest = next(int(line.split()[1]) for line in _lines("/proc/self/status") if line.startswith("VmHWM")) / 1024
    connection.send({"resume, s": ready, "group, ms": 1000 * each, "memory, MiB": highest})


def table(found: dict[str, dict[str, tuple[float, float]]]) -> Iterator[str]:
    """Yield a line for each role and measure: early, late, and late / early."""
    for role, measures in found.items():
        for name, (early, late) in measures.items():
            if not (role == "driver" and name.startswith("group")):
                yield f"{role:<13} {name:<12} {early:>9.2f} {late:>9.2f} {late / early:>6.2f}"


def head(arguments: argparse.Namespace) -> Iterator[str]:
    chip = next((line.partition(": ")[2] for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    yield f"python benchmarks/long_runs.py {' '.join(sys.argv[1:])}".rstrip()
    yield f"date: {datetime.date.today()}, commit: {commit()}"
    yield f"machine: {os.cpu_count()} cores, {chip or platform.machine()}, load {os.getloadavg()[0]:.1f}"
    yield f"versions: Python {platform.python_version()}, torch {version('torch')}, numpy {version('numpy')}"
    yield f"{arguments.groups} groups of {SAMPLES} samples of {TOKENS} tokens; smallest of {arguments.rounds} rounds"
    sizes = (f"{steps} steps" for steps in arguments.steps)
    yield f"early and late: {' and '.join(sizes)}, {' and '.join(map(str, arguments.segments))} segments"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs=2, default=(200, 20_000))
    parser.add_argument("--segments", type=int, nargs=2, default=(200, 10_000))
    parser.add_argument("--groups", type=int, default=10 * PER_STEP)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", help="of the made-up runs; in memory they are written in a minute")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    lines = list(head(arguments))
    print("\n".join(lines), flush=True)
    rounds: list[list[dict[str, dict[str, float]]]] = []
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        roots = [Path(directory) / name for name in ("early", "late")]
        for root, steps, segments in zip(roots, arguments.steps, arguments.segments, strict=True):
            root.mkdir()
            write_run(root, steps, segments)
        for _ in range(arguments.rounds):
            rounds.append([{role: measure(role, root, arguments.groups) for role in ROLES} for root in roots])
            print(f"round {len(rounds)}: {rounds[-1]}", file=sys.stderr, flush=True)
    best = {
        role: {name: tuple(min(each[i][role][name] for each in rounds) for i in (0, 1)) for name in rounds[0][0][role]}
        for role in ROLES
    }
    rows = list(table(best))
    over = sum(float(row.split()[-1]) > LIMIT for row in rows)
    rows += ["", f"{over} ratios above {LIMIT}"]
    lines += ["", f"{'':<26} {'early':>9} {'late':>9} {'ratio':>6}", *rows]
    print("\n".join(lines[-len(rows) - 2 :]))
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")
    return over


if __name__ == "__main__":
    sys.exit(main())
