"""Compare a step of TRL's published GRPO with a step of this program on the same machine.

    .venv/bin/python benchmarks/end_to_end.py runs/end-to-end --out FILE                 # all cells, an hour or two
    .venv/bin/python benchmarks/end_to_end.py runs/end-to-end --cells quickstart,20M-64  # or tiny-4 for a trial

Cells are models of 1, 20 and 120 M random parameters (Qwen3) with at most 8, 64 and 256 response tokens after prompts
of 32 tokens. One more cell is the quickstart: its start policy and its sums, with at most 4 tokens. The cell
`language-model` is SmolLM2-135M-Instruct on the sums of examples/language_model, with 128 responses of at most 24
tokens and one update, in TRL's fastest micro-batch; one more run of ours computes every prompt for each of its
samples. TRL runs in the environment of `make test-integrations`.

Both programs use the same model directory, prompts, samples per prompt, sequences and updates per step, longest
response, temperature 1 and learning rate. Rewards are centred by group and not scaled. Both compute in fp32, without
recomputed activations, on both cores of the machine, and synchronously (each step is sampled by the weights that it
trains). Threads differ: TRL samples and trains in one process with torch's own threads. Ours is an engine, an
orchestrator and one trainer rank; the engine and the rank have as many threads as there are cores and take turns. Each
program keeps its own loss (TRL's clipping as `dr_grpo`, our `dppo_binary_tv`), Adam constants, order of prompts and
warm-up of caches. TRL's gradient checkpointing, on by default, is off, which favours TRL. With random weights the
end-of-sequence token is as likely as any other, so nearly all responses have full length.

A round runs each program once, from its start; rounds alternate the order. Warm-up steps are not counted. The time of
a step is the median of the counted steps. The ratio of a cell is the median over its rounds, printed with the smallest
and the largest. A program that exceeds its share of --minutes is ended, and its finished steps count. Start-up is from
the first process to the first step. No step includes checkpoints, evaluation or the end of a run.

`plain` is transformers' own forward and backward pass (in TRL's process) on the sequences of a step, with a trivial
loss and without an optimizer. It is a baseline for TRL's and our trainer. On the quickstart and the language model,
one more run of each program, of at most --minutes, gives the greedy accuracy on the held-out sums over the seconds
spent in steps, which exclude evaluation.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

from end_to_end_sides import SideFailed, SideRun, describe, run_ours, run_trl
from end_to_end_task import CELLS, LANGUAGE_MODEL, QUICKSTART, Cell, make_model_and_prompts
from on_quickstart import machine, make_start_policy

TRL_PYTHON = Path(__file__).parents[1] / ".venv-integrations" / "bin" / "python"
EXAMPLE = Path(__file__).parents[1] / "examples" / "language_model"
CURVE_STEPS, CURVE_EVERY = 24, 4


@dataclass
class Compared:
    """The rounds of one cell."""

    cell: Cell
    trl: list[SideRun] = field(default_factory=list)
    ours: list[SideRun] = field(default_factory=list)
    curves: dict[str, SideRun] = field(default_factory=dict)  # by program
    unshared: list[SideRun] = field(default_factory=list)  # ours, with every prompt computed for each of its samples

    @property
    def ratios(self) -> list[float]:
        """Return our step time divided by TRL's, for each round."""
        return [ours.step_s / trl.step_s for ours, trl in zip(self.ours, self.trl, strict=True)]

    @property
    def limit(self) -> float | None:
        """Return the largest allowed ratio."""
        if self.cell.learns:
            return {QUICKSTART: 1.0, LANGUAGE_MODEL: 0.25}[self.cell.name]
        return 0.67 if self.cell.size in ("20M", "120M") and self.cell.response >= 64 else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="directory of models and runs")
    parser.add_argument("--cells", default=",".join(name for name in CELLS if name != "tiny-4"), help=", ".join(CELLS))
    parser.add_argument("--rounds", type=int, default=3, help="most rounds of a cell")
    parser.add_argument("--minutes", type=float, default=10.0, help="minutes for a cell; no round begins after them")
    parser.add_argument("--threads", type=int, help="OMP_NUM_THREADS of both; default: each process decides")
    parser.add_argument("--trl-python", type=Path, default=TRL_PYTHON, help="interpreter that has TRL")
    parser.add_argument("--no-curve", action="store_true", help="no accuracy over time on the quickstart")
    parser.add_argument("--out", type=Path, help="also write the text here, and every figure to FILE.json")
    arguments = parser.parse_args()
    if unknown := set(arguments.cells.split(",")) - CELLS.keys():
        parser.error(f"--cells: {', '.join(sorted(unknown))}: none of {', '.join(CELLS)}")
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []

    def say(line: str = "") -> None:
        print(line, flush=True)
        lines.append(line)
        if arguments.out is not None:
            arguments.out.write_text("\n".join(lines) + "\n")

    say(f"{machine()}; OMP_NUM_THREADS {arguments.threads or 'unset'}")
    done, failed = [], []
    for name in arguments.cells.split(","):
        cell = CELLS[name]
        compared = compare(cell, arguments, say)
        if not compared.ratios:
            failed.append(name)
            continue
        if cell.name == LANGUAGE_MODEL:
            run_unshared(compared, arguments, say)
        if cell.learns and not arguments.no_curve:
            draw_curves(compared, arguments, say)
        done.append(compared)
        if arguments.out is not None:
            figures = {c.cell.name: figures_of(c) for c in done}
            arguments.out.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")
    say()
    for line in (*table(done), *parts_of(done), *curves_of(done)):
        say(line)
    beyond = [c.cell.name for c in done if c.limit is not None and median(c.ratios) > c.limit]
    say(f"beyond the limit: {', '.join(beyond) or 'none'}; without a round: {', '.join(failed) or 'none'}")
    return len(beyond) + len(failed)


def compare(cell: Cell, arguments: argparse.Namespace, say: Callable[[str], None]) -> Compared:
    """Run the rounds of `cell`. A failed program is reported and ends them."""
    directory = prepare(cell, arguments.root)
    limit_s = 60 * arguments.minutes / 2
    steps = cell.warm + cell.timed
    sides = {
        "trl": partial(run_trl, cell, directory, arguments.trl_python, steps, 0, limit_s, arguments.threads),
        "ours": partial(run_ours, cell, directory, steps, 0, limit_s, arguments.threads),
    }
    compared, until = Compared(cell), time.monotonic() + 60 * arguments.minutes
    for number in range(arguments.rounds):
        if number and time.monotonic() > until:
            break
        order = list(sides) if number % 2 == 0 else list(reversed(sides))
        try:
            found = {name: sides[name]() for name in order}
        except SideFailed as error:
            say(f"{cell.name}, round {number + 1}: {error}")
            break
        compared.trl.append(found["trl"])
        compared.ours.append(found["ours"])
        say(
            f"{cell.name}, round {number + 1}: TRL {found['trl'].step_s:.2f} s, ours {found['ours'].step_s:.2f} s, "
            f"ratio {compared.ratios[-1]:.2f}"
        )
    return compared


def draw_curves(compared: Compared, arguments: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Run each program once more, with evaluations during the run."""
    cell, directory = compared.cell, prepare(compared.cell, arguments.root)
    asked = (CURVE_STEPS, CURVE_EVERY, 60 * arguments.minutes, arguments.threads)
    try:
        compared.curves["TRL"] = run_trl(cell, directory, arguments.trl_python, *asked)
        compared.curves["ours"] = run_ours(cell, directory, *asked)
    except SideFailed as error:
        say(f"accuracy over time: {error}")


def run_unshared(compared: Compared, arguments: argparse.Namespace, say: Callable[[str], None]) -> None:
    cell, directory = compared.cell, prepare(compared.cell, arguments.root)
    asked = (cell.warm + cell.timed, 0, 60 * arguments.minutes, arguments.threads)
    try:
        run = run_ours(cell, directory, *asked, share=False)
    except SideFailed as error:
        say(f"without shared prompts: {error}")
        return
    compared.unshared.append(run)
    ratio = run.step_s / over(compared.trl, "step_s")
    say(f"{cell.name} without shared prompts: ours {run.step_s:.2f} s, ratio {ratio:.2f} to the median of TRL's rounds")


def prepare(cell: Cell, root: Path) -> Path:
    """Return the directory of the cell with `model`, `prompts.jsonl` and, if it learns, `heldout.jsonl`."""
    directory = root.absolute() / cell.size
    if cell.name == LANGUAGE_MODEL:
        make_language_model(root.absolute(), directory)
        return directory
    if cell.name != QUICKSTART:
        if not (directory / "prompts.jsonl").exists():  # written last
            make_model_and_prompts(cell, directory)
        return directory
    if not (directory / "warmup" / "model").exists():
        make_start_policy(directory, [])
    shutil.copy(directory / "task" / "train.jsonl", directory / "prompts.jsonl")
    shutil.copy(directory / "task" / "heldout.jsonl", directory / "heldout.jsonl")
    if not (directory / "model").exists():
        (directory / "model").symlink_to(directory / "warmup" / "model")
    return directory


def make_language_model(root: Path, directory: Path) -> None:
    """Make the model and the sums of examples/language_model, with prompts as conversations."""
    subprocess.run([sys.executable, EXAMPLE / "model.py", root], check=True)
    subprocess.run([sys.executable, EXAMPLE / "make_task.py", directory / "task"], check=True)
    if not (directory / "model").exists():
        (directory / "model").symlink_to(root / "SmolLM2-135M-Instruct")
    for source, target in (("train", "prompts"), ("heldout", "heldout")):
        rows = [json.loads(line) for line in (directory / "task" / f"{source}.jsonl").read_text().splitlines()]
        for row in rows:
            row["prompt"] = [{"role": "user", "content": f"{row['prompt']} Reply with only the number."}]
        (directory / f"{target}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def table(done: list[Compared]) -> list[str]:
    head = (
        f"{'cell':<11} {'sequences':>9} {'TRL s':>8} {'ours s':>8} {'ratio':>6} {'of rounds':>12} {'limit':>6} "
        f"{'TRL tok/s':>10} {'ours tok/s':>10} {'start-up':>13} {'plain s':>8}"
    )
    return [head, *(row(compared) for compared in done), ""]


def row(c: Compared) -> str:
    spread = f"{min(c.ratios):.2f} to {max(c.ratios):.2f}"
    limit = "" if c.limit is None else f"{c.limit:.2f}"
    startup = f"{over(c.trl, 'startup_s'):.1f}, {over(c.ours, 'startup_s'):.1f}"
    plain = [run.plain_s for run in c.trl if run.plain_s is not None]
    return (
        f"{c.cell.name:<11} {c.cell.sequences:>9} {over(c.trl, 'step_s'):>8.2f} {over(c.ours, 'step_s'):>8.2f} "
        f"{median(c.ratios):>6.2f} {spread:>12} {limit:>6} {over(c.trl, 'tokens_per_s'):>10,.0f} "
        f"{over(c.ours, 'tokens_per_s'):>10,.0f} {startup:>13} {f'{median(plain):.2f}' if plain else '':>8}"
    )


def parts_of(done: list[Compared]) -> list[str]:
    """Return the table of median seconds of each part of a step, for both programs."""
    lines = ["parts of a step, seconds"]
    for compared in done:
        for program, runs in (("TRL", compared.trl), ("ours", compared.ours)):
            parts = {name: median(run.parts[name] for run in runs) for name in runs[0].parts}
            shown = ", ".join(f"{name} {seconds:.3f}" for name, seconds in parts.items())
            lines.append(f"{compared.cell.name:<11} {program:<5} {shown}")
    return [*lines, ""]


def curves_of(done: list[Compared]) -> list[str]:
    lines = []
    for compared in done:
        for program, run in compared.curves.items():
            points = ", ".join(f"{accuracy:.1%} at {seconds:.0f}" for seconds, accuracy in run.accuracy)
            lines.append(f"greedy accuracy on {compared.cell.name}, {program}, over seconds of steps: {points}")
    return [*lines, ""] if lines else []


def over(runs: list[SideRun], name: str) -> float:
    """Return the median of a figure over the rounds."""
    return median(getattr(run, name) for run in runs)


def figures_of(compared: Compared) -> dict[str, object]:
    return {
        "ratios": compared.ratios,
        "trl": [describe(run) for run in compared.trl],
        "ours": [describe(run) for run in compared.ours],
        "curves": {name: describe(run) for name, run in compared.curves.items()},
        "unshared": [describe(run) for run in compared.unshared],
    }


if __name__ == "__main__":
    sys.exit(main())
