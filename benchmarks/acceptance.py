"""What a bound on the whole step does at learning rates that are too large: the quickstart's task with and without it.

    python benchmarks/acceptance.py [--lr 5e-4 1e-3 2e-3] [--seeds 1 2 3] [--bound 0.05] [--steps 40]

Engine in bf16, trainer in fp32, 16 updates a step, DPPO by binary TV. A pair of runs for every learning rate and seed
differs in acceptance.bound alone. Each seed has a task, a start policy and rollouts of its own. `cost` is
time/acceptance_s as a share of the steps' time, halvings included.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import mean

from on_quickstart import machine, make_start_policy, train_from_start

from dppo_megatron.observability.tail import read_records


def read_run(run: Path) -> dict[str, float]:
    records = read_records(run / "metrics.jsonl")
    steps = [r for r in records if "time/step_s" in r]
    accuracy = {r["step"]: r["eval/accuracy"] for r in records if "eval/accuracy" in r}
    return {
        "before": accuracy[min(accuracy)],
        "after": accuracy[max(accuracy)],
        "masked": mean(r["policy/masked_share"] for r in steps),
        "kept": mean(r.get("acceptance/fraction", 1.0) for r in steps),
        "rejected": sum(r.get("acceptance/rejected", 0.0) > 0 for r in steps),
        "cost": sum(r.get("time/acceptance_s", 0.0) for r in steps) / sum(r["time/step_s"] for r in steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", nargs="+", default=["5e-4", "1e-3", "2e-3"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--bound", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE", help="passed to every run")
    arguments = parser.parse_args()
    layout = ["parallel.world_size=1", "parallel.tensor=1"]
    print(f"{machine()}; {arguments.steps} steps of 16 updates, one trainer rank, one vLLM server in bf16")
    print("     lr  seed  bound  accuracy         masked  kept  steps not whole  cost")
    with tempfile.TemporaryDirectory() as name:
        for seed in arguments.seeds:
            root = Path(name) / f"seed-{seed}"
            make_start_policy(root, layout, seed)
            for lr in arguments.lr:
                for bound in ("null", f"{arguments.bound:g}"):
                    run = root / f"{lr}-{bound}"
                    settings = [
                        f"run.seed={seed}",
                        f"optimizer.lr={lr}",
                        f"acceptance.bound={bound}",
                        f"train.steps={arguments.steps}",
                        "train.updates_per_step=16",
                        "engine.dtype=bf16",
                        "weight_sync.probe_tolerance=0.3",
                    ]
                    train_from_start(root, run, [*layout, *settings, *arguments.set])
                    m = read_run(run)
                    print(
                        f"{lr:>7}{seed:>6}{bound:>7}  {m['before']:.1%} -> {m['after']:.1%}{m['masked']:>9.1%}"
                        f"{m['kept']:>6.2f}{m['rejected']:>11.0f} of {arguments.steps}{m['cost']:>7.1%}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
