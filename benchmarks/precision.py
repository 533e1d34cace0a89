"""Compare the mismatch of engine and trainer when both compute in bf16 and when both compute in fp16.

    make quickstart                                          once, for its task and its start policy
    python benchmarks/precision.py                           only the start policy, a minute per row on two idle cores

    for d in bf16 fp16; do                                   the policies after training, a few minutes each
      dppo-megatron train examples/quickstart/config.yaml --set run.dir=runs/precision/$d --set model.dtype=$d \\
        --set engine.dtype=$d --set weight_sync.probe_tolerance=null
    done
    python benchmarks/precision.py --run runs/precision/bf16 --run runs/precision/fp16

Measures every policy (the start, and each run's newest checkpoint) in every dtype, regardless of the dtype that it was
trained in. An engine of that dtype samples responses, and the trainer scores their tokens with the code of
`dppo-megatron certify`. KL is the estimator k3, in nats per token. For runs it also prints their own records of each
step.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from dppo_megatron.config import Config, read_config
from dppo_megatron.lab.certify.certificate_text import sampled
from dppo_megatron.lab.certify.command import certify
from dppo_megatron.lab.certify.compare import SHARES
from dppo_megatron.report.tail import read_records
from dppo_megatron.run_dir import RunDir

CONFIG = Path("examples/quickstart/config.yaml")
DTYPES = ("fp32", "bf16", "fp16")


def measured(config: Path, dtype: str, root: Path) -> Config:
    """Return `config` with engine and trainer in `dtype`, and its own directory."""
    settings = {
        "run.dir": root / dtype,
        "model.dtype": dtype,
        "engine.dtype": dtype,
        "optimizer.loss_scale": "{}",
        "weight_sync.probe_tolerance": 1,  # measured here, not rejected
        "weight_sync.transport": "shared_storage",
    }
    return read_config(config, [f"{name}={value}" for name, value in settings.items()])


def rows(config: Path, run: Path | None, dtypes: Sequence[str], prompts: int) -> Iterator[str]:
    name = "start policy" if run is None else str(run)
    for dtype in dtypes:
        with tempfile.TemporaryDirectory(prefix="precision-") as directory:
            found = certify(measured(config, dtype, Path(directory)), str(config), prompts=prompts, run=run)[1]
        table = sampled(found)
        shares = "".join(f"{table[f'above_{share:g}']:10.2%}" for share in SHARES)
        differences = "".join(f"{table[column]:10.1e}" for column in ("kl", "mean", "largest"))
        yield f"{name:28}{dtype:6}{table['tokens']:8}{differences}{shares}"


def recorded(run: Path) -> str:
    """Return the mismatch that the run recorded for its rollouts, and its first and last accuracy."""
    config = read_config(RunDir(run).config)
    found = list(read_records(run / "metrics.jsonl"))
    kl = [record["mismatch/kl"] for record in found if record.get("mismatch/kl") is not None]
    accuracy = [record["eval/accuracy"] for record in found if "eval/accuracy" in record]
    overflowed = sum(record.get("train/overflowed_updates", 0) for record in found)
    line = f"{run!s:28}trainer {config.model.dtype}, engine {config.engine.dtype}: "
    if kl:
        line += f"mismatch/kl mean {sum(kl) / len(kl):.1e}, max {max(kl):.1e} over {len(kl)} steps"
    if accuracy:
        line += f"; eval/accuracy {accuracy[0]:.3f} -> {accuracy[-1]:.3f}"
    return line + (f"; {overflowed:.0f} updates overflowed" if config.model.dtype == "fp16" else "")


def main(config: Path, runs: Sequence[Path], dtypes: Sequence[str], prompts: int) -> None:
    print(f"# {platform.processor() or platform.machine()}; {platform.platform()}")
    above = "".join(f"{f'> {share:g}':>10}" for share in SHARES)
    print(f"{'policy':28}{'dtype':6}{'tokens':>8}{'KL (k3)':>10}{'mean':>10}{'largest':>10}{above}", flush=True)
    for source, run in [(config, None), *((RunDir(run).config, run) for run in runs)]:
        for row in rows(source, run, dtypes, prompts):
            print(row, flush=True)
    for run in runs:
        print(recorded(run))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=CONFIG, help="config of the start policy")
    parser.add_argument("--run", type=Path, action="append", default=[], help="directory of a run with a checkpoint")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="default: bf16 and fp16")
    parser.add_argument("--prompts", type=int, default=256, help="answered, one sample each")
    chosen = parser.parse_args()
    main(chosen.config, chosen.run, chosen.dtype or ["bf16", "fp16"], chosen.prompts)
