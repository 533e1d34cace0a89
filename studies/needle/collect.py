"""Copy the results of runs to studies/needle/results/NAME.

python studies/needle/collect.py search runs/needle/search      # one or more `--out` of `dppo-megatron study`

- `rows/`: a JSON file for each run, as `dppo-megatron study` wrote it.
- `steps.parquet`: a row for each step: shares of the first words among the step's samples (counted in the bank, because
  the run's metrics of single rewards mix neighbouring steps if rollouts are stale), reward, masked tokens.
- `tokens.parquet`: tokens and masked tokens of each step by the engine's probability mu and the sign of the advantage.

Runs that were collected before stay, also if their run directories are gone.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from needle import NEEDLE, USUAL, VOCABULARY

from dppo_megatron.bank.reader import BankReader
from dppo_megatron.lab.study.rows import StudyRow, add_row, read_rows
from dppo_megatron.lab.view.source import Source
from dppo_megatron.lab.view.tokens import VALUES, TrainedTokens
from dppo_megatron.report.history import load_history

HERE = Path(__file__).parent
STEPS = {
    "reward": "rollout/reward_mean",
    "masked": "policy/masked_share",
    "masked_positive": "policy/masked_share_positive",
    "masked_negative": "policy/masked_share_negative",
    "ratio_max": "policy/ratio_max",
    "mismatch_kl": "mismatch/kl",
    "replay_disagreement": "moe/routing_replay_disagreement",
}
EDGES = np.array([0, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 0.9])  # lower edges of the bins of mu


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("studies", type=Path, nargs="+", help="directories of studies")
    arguments = parser.parse_args()
    results = HERE / "results" / arguments.name
    (results / "rows").mkdir(parents=True, exist_ok=True)
    known = {_key(row) for row in read_rows(results)}
    new, steps, tokens = [], [], []
    for study in arguments.studies:
        for row in read_rows(study):
            if _key(row) in known or row.status != "done":
                continue
            run = study / "runs" / row.method / row.condition / f"seed-{row.seed}"
            of = dict(zip(("method", "condition", "seed"), _key(row), strict=True))
            steps += [of | values for values in step_rows(run)]
            tokens += [of | values for values in token_rows(run)]
            new.append(row)
    for name, rows in (("steps", steps), ("tokens", tokens)):
        _append(results / f"{name}.parquet", rows)
    for row in new:  # last, because a run with a row counts as collected
        add_row(results, row)
    print(f"{results}: {len(read_rows(results))} runs, {len(known)} of them collected before")
    return 0


def step_rows(run: Path) -> Iterator[dict[str, Any]]:
    history = load_history(run, run.name)
    series = {name: dict(zip(*history.series(metric), strict=True)) for name, metric in STEPS.items()}
    for step, shares in enumerate(first_words(run), start=1):
        if step in series["reward"]:
            yield {"step": step} | shares | {name: series[name].get(step) for name in STEPS}


def first_words(run: Path) -> Iterator[dict[str, float]]:
    """Yield the shares of samples that begin with NEEDLE and with a word of the tail, for each step of the bank."""
    bank = BankReader(run / "bank")
    bank.refresh()
    needle, usual = VOCABULARY.index(NEEDLE), VOCABULARY.index(USUAL)
    for start, stop in bank.segments():
        groups = [bank.read(entry) for entry in bank.entries(start, stop)]
        firsts = np.array([rollout.token_ids[0] for group in groups for rollout in group.rollouts])
        tail = (firsts != needle) & (firsts != usual)
        yield {"needle": float((firsts == needle).mean()), "tail": float(tail.mean())}


def token_rows(run: Path) -> Iterator[dict[str, Any]]:
    """Count the tokens that the trainer stored. `mu`: lower edge of the bin; `sign`: of the advantage."""
    stored, bank = TrainedTokens(Source.open(run)), BankReader(run / "bank")
    bank.refresh()
    counts: Counter[tuple[int, float, int, bool]] = Counter()
    for step, (start, stop) in enumerate(bank.segments(), start=1):
        for entry in bank.entries(start, stop):
            group = bank.read(entry)
            if group.prompt.position not in stored.positions:
                continue
            signs = np.sign(group.rewards - group.rewards.mean()).astype(int)
            for sample, (rollout, sign) in enumerate(zip(group.rollouts, signs.tolist(), strict=True)):
                mu = np.exp(rollout.rollout_logprob)
                masked = stored.values(group.prompt.position, sample, len(mu))[VALUES.index("masked")]
                bins = EDGES[np.searchsorted(EDGES, mu, side="right") - 1]
                counts.update((step, edge, sign, mask == 1) for edge, mask in zip(bins.tolist(), masked, strict=True))
    for step, edge, sign in sorted({key[:3] for key in counts}):
        masked = counts[step, edge, sign, True]
        yield {
            "step": step,
            "mu": edge,
            "sign": sign,
            "tokens": masked + counts[step, edge, sign, False],
            "masked": masked,
        }


def _key(row: StudyRow) -> tuple[str, str, int]:
    return row.method, row.condition, row.seed


def _append(path: Path, rows: list[dict[str, Any]]) -> None:
    if rows:
        new = pa.Table.from_pylist(rows)
        fields = [field.with_type(pa.float64()) if pa.types.is_null(field.type) else field for field in new.schema]
        new = new.cast(pa.schema(fields))  # a column of None only has no type
        if path.exists():
            old = pq.read_table(path)
            new = pa.concat_tables([old, new], promote_options="default")
        pq.write_table(new, path)


if __name__ == "__main__":
    sys.exit(main())
