"""Compare accuracy and wall time of synchronous and asynchronous sampling on the quickstart's task.

    python benchmarks/asynchronous.py [--staleness 0 1 4] [--steps 40] [--ranks 1] [--set A.B=VALUE ...]

Creates the task and the start policy once. Then trains from it once for every value of rollout.max_staleness, with
everything else equal. The wall time is from the first publish to the end of the last step. It excludes the start of the
processes and the last evaluation.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import mean

from on_quickstart import machine, make_start_policy, train_from_start

from dppo_megatron.report.tail import read_records


def read_run(run: Path) -> dict[str, float]:
    records = read_records(run / "metrics.jsonl")
    steps = [r for r in records if "time/step_s" in r]
    accuracy = {r["step"]: r["eval/accuracy"] for r in records if "eval/accuracy" in r}
    return {
        "wall": steps[-1]["time"] - steps[0]["time"] + steps[0]["time/step_s"],
        "before": accuracy[min(accuracy)],
        "after": accuracy[max(accuracy)],
        "wait": mean(r["time/wait_s"] for r in steps),
        "work": mean(r["time/forward_backward_s"] + r["time/optimizer_s"] for r in steps),
        "publish": mean(r["time/publish_s"] for r in steps),
        "lag": mean(r["rollout/staleness_mean"] for r in steps),
        "largest": max(r["rollout/staleness_max"] for r in steps),
        "kl": mean(r.get("mismatch/kl", 0.0) for r in steps),
        "masked": mean(r.get("policy/masked_share", 0.0) for r in steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=1, help="trainer ranks (tensor-parallel)")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE", help="passed to every run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        layout = [f"parallel.world_size={arguments.ranks}", f"parallel.tensor={arguments.ranks}"]
        make_start_policy(root, layout)
        print(f"{machine()}; {arguments.steps} steps, {arguments.ranks} trainer rank(s), one vLLM server")
        print("bound  wall s  step s  wait s  compute s  publish s  lag mean  lag max  mismatch/kl  masked  accuracy")
        for bound in arguments.staleness:
            run = root / f"staleness-{bound}"
            settings = [f"train.steps={arguments.steps}", f"rollout.max_staleness={bound}"]
            train_from_start(root, run, [*layout, *settings, *arguments.set])
            m = read_run(run)
            print(
                f"{bound:>5}{m['wall']:>8.1f}{m['wall'] / arguments.steps:>8.2f}{m['wait']:>8.2f}{m['work']:>11.2f}"
                f"{m['publish']:>11.2f}{m['lag']:>10.2f}{m['largest']:>9.0f}{m['kl']:>13.1e}{m['masked']:>8.1%}"
                f"  {m['before']:.1%} -> {m['after']:.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
