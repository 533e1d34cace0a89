"""Measure cost and effect of `engine.exact` on the quickstart's run, with each engine in both precisions.

    python benchmarks/exact.py [--engine vllm] [--dtype bf16] [--ranks 2] [--steps 10] [--set A.B=VALUE ...]

Creates the task and the start policy once. Then trains from it with and without the setting, for every engine and
precision, with everything else equal. The means exclude the first step, which selects kernels and fills caches.
Generation and training take turns in these runs (rollout.max_staleness 0), so neither cost hides the other.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path
from statistics import mean

from on_quickstart import machine, make_start_policy, train_from_start

from dppo_megatron.report.tail import read_records

ENGINES, DTYPES = ("vllm", "sglang"), ("fp32", "bf16")


def read_run(run: Path) -> dict[str, float]:
    records = [r for r in read_records(run / "metrics.jsonl") if r["step"] > 1]
    steps = [r for r in records if "time/step_s" in r]
    generated = [r for r in records if "time/generate_s" in r]
    return {
        "tokens/s": mean(r["rollout/generated_tokens_per_s"] for r in generated),
        "generate": mean(r["time/generate_s"] for r in generated),
        "compute": mean(r["time/forward_backward_s"] for r in steps),
        "step": mean(r["time/step_s"] for r in steps),
        "kl": max(abs(r["mismatch/kl"]) for r in steps),
        "largest": max(r["mismatch/max_abs_logprob_difference"] for r in steps),
        "probe": max(r["probe/max_abs_logprob_difference"] for r in steps),
    }


def settings_of(engine: str, dtype: str, ranks: int, exact: bool) -> list[str]:
    return [
        f"engine.kind={engine}",
        f"engine.dtype={dtype}",
        f"model.dtype={dtype}",
        f"parallel.world_size={ranks}",
        f"parallel.tensor={ranks}",
        "weight_sync.probe_tolerance=0.3",
        f"engine.exact={str(exact).lower()}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", action="append", choices=ENGINES)
    parser.add_argument("--dtype", action="append", choices=DTYPES)
    parser.add_argument("--ranks", type=int, default=1, choices=(1, 2), help="trainer ranks (tensor-parallel)")
    parser.add_argument("--steps", type=int, default=10, help="2 or more")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE", help="passed to every run")
    arguments = parser.parse_args()
    cells = itertools.product(arguments.engine or ENGINES, arguments.dtype or DTYPES, (False, True))
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        make_start_policy(root, [])
        print(f"{machine()}; steps 2 to {arguments.steps}, {arguments.ranks} trainer rank(s), one engine")
        print("engine dtype exact  tokens/s  generate s  fwd+bwd s  step s  mismatch/kl  largest    probe")
        for engine, dtype, exact in cells:
            run = root / f"{engine}-{dtype}-{exact}"
            settings = settings_of(engine, dtype, arguments.ranks, exact)
            train_from_start(root, run, [*settings, f"train.steps={arguments.steps}", *arguments.set])
            m = read_run(run)
            print(
                f"{engine:<7}{dtype:<6}{exact!s:<5}{m['tokens/s']:>10.0f}{m['generate']:>12.2f}{m['compute']:>11.2f}"
                f"{m['step']:>8.2f}{m['kl']:>13.1e}{m['largest']:>9.1e}{m['probe']:>9.1e}",
                flush=True,
            )


if __name__ == "__main__":
    main()
