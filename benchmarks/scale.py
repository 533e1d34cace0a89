"""Measure the orchestrator, bank and batch readers at the size of large runs, with engines that answer from a table.

    python benchmarks/scale.py --directory DIR [--samples 4096] [--tokens 16384] [--engines 64] [--readers 64]
                               [--stall 6 --die 6]

Trainer ranks read every step of a bank as soon as it is stored, and the benchmark publishes policies between the steps
as a trainer would. Then every step is read again from the disk. The speed of the disk is measured for comparison: the
same number of processes reads the same uncached file in large blocks. The last lines compare the prediction of `plan`
from the bank's lengths with the measurement. docs/scale.md has more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from scale_parts import (
    PROMPT_TOKENS,
    Peaks,
    RankProcesses,
    Reading,
    Shape,
    Watcher,
    bank_batches,
    drop_cache,
    segment,
    write_run,
)
from table_engines import TableSettings

from dppo_megatron.bank import BankReader
from dppo_megatron.common.retry import look_again_s
from dppo_megatron.config import Config, read_config
from dppo_megatron.report.tail import read_records
from dppo_megatron.rollout.engines.secret import make_secret
from dppo_megatron.rollout.fleet.live_engines import LiveEngines
from dppo_megatron.run.plan.pace import Pace, PaceSettings, predict
from dppo_megatron.run_dir import RunDir
from dppo_megatron.weights.published import PublishedPolicy

HERE = Path(__file__).parent
GROUP = 16  # samples
START_S = 120


@dataclass
class Measured:
    """Seconds and readings of all ranks for every step, and measurements after the last step."""

    wait_s: list[float] = field(default_factory=list)
    read_s: list[float] = field(default_factory=list)
    train_s: list[float] = field(default_factory=list)
    publish_s: list[float] = field(default_factory=list)
    after_last_s: list[float] = field(default_factory=list)  # from the last sample in the bank to the last rank's batch
    staleness: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    readings: list[list[Reading]] = field(default_factory=list)  # usually from the page cache
    disk_mb_s: list[float] = field(default_factory=list)
    cold_s: list[float] = field(default_factory=list)  # of all ranks, read from the disk
    cold_bytes: list[int] = field(default_factory=list)
    peaks: dict[str, Peaks] = field(default_factory=dict)
    seconds: float = 0.0  # from the first publish to the last

    def pace(self) -> Pace:
        lag = float(np.average(self.staleness, weights=self.tokens))
        return Pace(mean(self.wait_s), sum(map(mean, (self.read_s, self.train_s, self.publish_s))), lag)


@contextmanager
def table_engines(root: Path, settings: TableSettings) -> Iterator[tuple[int, list[str]]]:
    """Start the table engines; yield their process id and URLs."""
    path = root / "engines.json"
    path.write_text(json.dumps(asdict(settings)))
    command = [sys.executable, str(HERE / "table_engines.py"), str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.pid, [f"http://127.0.0.1:{port}" for port in json.loads(process.stdout.readline())]
        finally:
            process.stdin.close()
            process.wait(30)


@contextmanager
def orchestrator(config: Path, log: Path) -> Iterator[subprocess.Popen]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])}
    command = [sys.executable, "-m", "dppo_megatron", "orchestrator", str(config)]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)


async def publish(config: Config, version: int) -> None:
    """Publish without weights: set `version` on every engine that responds, then announce it to the orchestrator."""
    run = RunDir(config.run.dir)
    engines = LiveEngines(config)
    path = run.weights_of(version)
    path.mkdir(exist_ok=True)
    try:
        answering, _ = await engines.answering()
        loaded = await engines.on(answering, lambda engine: engine.load_weights(path, version))
        confirmed = {url: answering[url].instance for url, found in loaded.items() if isinstance(found, float)}
        PublishedPolicy(version, str(path), time.time(), confirmed).write(run.published)
    finally:
        await engines.close()


def check_alive(config: Config, filling: subprocess.Popen) -> None:
    if filling.poll() is not None:
        sys.exit(f"the orchestrator ended with {filling.returncode}; see its log in {config.run.dir}")


def wait_until_started(config: Config, filling: subprocess.Popen) -> None:
    """Wait until the orchestrator opens its bank, which follows its imports and the checks of its engines."""
    deadline = time.monotonic() + START_S
    while not any(RunDir(config.run.dir).bank.glob("*")):
        check_alive(config, filling)
        if time.monotonic() > deadline:
            sys.exit(f"the orchestrator has not opened its bank within {START_S} s")
        time.sleep(0.1)


def run(config: Config, ranks: RankProcesses, filling: subprocess.Popen, train_s: float, watcher: Watcher) -> Measured:
    measured, first = Measured(), bank_batches(config, 0)
    wait_until_started(config, filling)
    asyncio.run(publish(config, 0))
    began = time.perf_counter()
    for step in range(config.train.steps):
        at = time.perf_counter()
        while not first.ready(step):
            check_alive(config, filling)
            time.sleep(look_again_s(time.perf_counter() - at))
        measured.wait_s.append(time.perf_counter() - at)
        seconds, readings = ranks.read(step)
        reader = BankReader(RunDir(config.run.dir).bank)
        reader.refresh()
        groups = config.rollout.prompts_per_step
        entries = reader.entries(step * groups, (step + 1) * groups)
        measured.after_last_s.append(time.time() - max(entry.time for entry in entries))
        measured.read_s.append(seconds)
        measured.readings.append(readings)
        measured.staleness.append(readings[0].metrics["rollout/staleness_mean"])
        measured.tokens.append(sum(int(entry.sampled.sum()) for entry in entries))
        time.sleep(train_s)
        measured.train_s.append(train_s)
        at = time.perf_counter()
        asyncio.run(publish(config, step + 1))
        measured.publish_s.append(time.perf_counter() - at)
    measured.seconds = time.perf_counter() - began
    filling.wait(120)
    measured.peaks = watcher.end()
    for step in range(config.train.steps):
        measured.disk_mb_s.append(ranks.raw_speed(segment(config, step)))
        drop_cache(segment(config, step))
        seconds, readings = ranks.read(step)
        measured.cold_s.append(seconds)
        measured.cold_bytes.append(sum(reading.file_bytes for reading in readings))
    return measured


def predicted(config: Config, measured: Measured, tokens_per_s: float) -> Pace:
    """Return the prediction of `plan` from the lengths in the bank and the speed of storing the first step."""
    reader = BankReader(RunDir(config.run.dir).bank)
    entries = reader.entries(0, reader.refresh())
    stored, tokens = sum(entry.size for entry in entries), sum(int(entry.sampled.sum()) for entry in entries)
    actual = measured.pace()
    settings = PaceSettings(
        prompts_per_step=config.rollout.prompts_per_step,
        concurrent=config.rollout.max_concurrent_groups,
        max_staleness=config.rollout.max_staleness,
        steps=config.train.steps,
        tokens_per_s=tokens_per_s,
        bytes_per_token=stored / tokens,
        store_bytes_per_s=sum(entry.size for entry in entries[: config.rollout.prompts_per_step]) / measured.wait_s[0],
        train_s=actual.train_s,
    )
    return predict([entry.response_lengths for entry in entries], settings)


def report(config: Config, arguments: argparse.Namespace, measured: Measured, plan: Pace) -> Iterator[str]:
    rollout = config.rollout
    records = [r for r in read_records(RunDir(config.run.dir).rollout_metrics) if "time/generate_s" in r]
    yield f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    yield (
        f"{arguments.samples} samples a step in groups of {GROUP}, at most {arguments.tokens} tokens (lognormal, "
        f"median {arguments.median:g}, sigma {arguments.sigma:g}), K = {rollout.topk_logprobs}, routes of "
        f"{Shape.layers} layers with {Shape.experts_per_token} experts; "
        f"{arguments.engines} engines of {arguments.rate:g} tokens/s a sample, {arguments.stall} stall, "
        f"{arguments.die} die; {arguments.readers} ranks in {arguments.processes} processes"
    )
    size = sum(segment(config, step).stat().st_size for step in range(config.train.steps))
    yield f"{config.train.steps} steps, {sum(measured.tokens):,} tokens, {size / 1e6:,.0f} MB"
    yield ""
    yield "step  wait s  read s  train s  publish s  last sample to batch s  staleness  read MB/s  s of a rank, most"
    for i, readings in enumerate(measured.readings):
        speed = sum(r.file_bytes for r in readings) / 1e6 / measured.read_s[i]
        yield (
            f"{i:>4}{measured.wait_s[i]:>8.2f}{measured.read_s[i]:>8.2f}{measured.train_s[i]:>9.2f}"
            f"{measured.publish_s[i]:>11.2f}{measured.after_last_s[i]:>24.2f}{measured.staleness[i]:>11.2f}"
            f"{speed:>11.0f}{max(r.seconds for r in readings):>19.2f}"
        )
    yield ""
    yield "step  disk alone MB/s  ranks from disk MB/s  share  asked / stored bytes"
    for i, (disk, seconds, asked) in enumerate(
        zip(measured.disk_mb_s, measured.cold_s, measured.cold_bytes, strict=True)
    ):
        speed = asked / 1e6 / seconds
        yield (
            f"{i:>4}{disk:>17.0f}{speed:>22.0f}{speed / disk:>7.2f}{asked / segment(config, i).stat().st_size:>22.2f}"
        )
    yield ""
    readings = [r for of in measured.readings for r in of]
    yield (
        f"a rank's share of a step: at most {max(r.batch_bytes for r in readings) / 1e6:.0f} MB of tensors from "
        f"{max(r.file_bytes for r in readings) / 1e6:.0f} MB of files; {mean(r.cpu_s for r in readings):.2f} CPU s, of "
        f"all {sum(r.cpu_s for r in readings) / config.train.steps:.1f}"
    )
    yield "process                  anonymous MB, most   open files, most   CPU s"
    for name, peaks in sorted(measured.peaks.items()):
        yield f"{name:<25}{peaks.anonymous / 1e6:>18.0f}{peaks.files:>19}{peaks.cpu_s:>8.1f}"
    counted = {
        name: sum(record.get(name, 0) for record in records)
        for name in ("engine/deaths", "engine/restarts", "engine/caught_up", "engine/retried_requests")
    }
    yield "engines: " + ", ".join(f"{name.partition('/')[2]} {count:.0f}" for name, count in counted.items())
    yield ""
    actual = measured.pace()
    yield "           step s  wait s  staleness"
    for name, pace in (("measured", actual), ("plan", plan)):
        yield f"{name:<9}{pace.step_s:>8.2f}{pace.wait_s:>8.2f}{pace.staleness:>11.2f}"
    yield f"ratio    {plan.step_s / actual.step_s:>8.2f}{_ratio(plan.wait_s, actual.wait_s):>8}" + (
        f"{_ratio(plan.staleness, actual.staleness):>11}"
    )


def _ratio(one: float, other: float) -> str:
    return f"{one / other:.2f}" if other else "-"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--directory", type=Path, required=True, help="directory on the file system to measure; 6 GB per step"
    )
    parser.add_argument("--samples", type=int, default=4096, help="of a step")
    parser.add_argument("--tokens", type=int, default=16_384, help="longest response")
    parser.add_argument("--median", type=float, help="median length; default: a quarter of --tokens")
    parser.add_argument("--sigma", type=float, default=0.9)
    parser.add_argument("--topk", type=int, default=20)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--concurrent", type=int, help="groups sampled at once; default: all groups of a step")
    parser.add_argument("--rate", type=float, default=1500.0, help="tokens per second of each sample")
    parser.add_argument("--stall", type=int, default=0, help="engines that stop answering for --fault-s")
    parser.add_argument("--die", type=int, default=0, help="engines that are down for --fault-s")
    parser.add_argument("--fault-s", type=float, default=15.0)
    parser.add_argument("--readers", type=int, default=64, help="data-parallel ranks")
    parser.add_argument("--processes", type=int, default=2, help="processes that read for these ranks")
    parser.add_argument("--train-s", type=float, default=10.0, help="of a step")
    arguments = parser.parse_args(argv)
    if arguments.samples % GROUP:
        parser.error(f"--samples {arguments.samples}: not a multiple of the {GROUP} samples of a group")
    if arguments.stall + arguments.die >= arguments.engines:
        parser.error("--stall and --die leave no engine; raise --engines")
    arguments.median = arguments.median or arguments.tokens / 4
    for line in measure(arguments):
        print(line, flush=True)


def measure(arguments: argparse.Namespace) -> Iterator[str]:
    shape, groups = Shape(), arguments.samples // GROUP
    broken = np.random.default_rng(0).permutation(arguments.engines)[: arguments.stall + arguments.die].tolist()
    faults = {engine: "stall" if i < arguments.stall else "die" for i, engine in enumerate(broken)}
    arguments.directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        root = Path(name)
        engines = TableSettings(
            engines=arguments.engines,
            faults=faults,
            fault_s=arguments.fault_s,
            longest=arguments.tokens,
            median=arguments.median,
            sigma=arguments.sigma,
            topk=arguments.topk,
            layers=shape.layers,
            experts=shape.experts,
            experts_per_token=shape.experts_per_token,
            tokens_per_s=arguments.rate,
            vocab_size=shape.vocab_size,
            max_model_len=arguments.tokens + PROMPT_TOKENS,
            model=str(root / "model"),
        )
        with table_engines(root, engines) as (engines_pid, urls):
            longest = arguments.tokens + PROMPT_TOKENS
            path = write_run(
                root,
                shape,
                {
                    "parallel": {"world_size": arguments.readers},
                    "train": {"steps": arguments.steps, "micro_batch_tokens": longest},
                    "rollout": {
                        "prompts_per_step": groups,
                        "group_size": GROUP,
                        "max_response_tokens": arguments.tokens,
                        "topk_logprobs": arguments.topk,
                        "routing_replay": True,
                        "max_staleness": arguments.staleness,
                        "max_concurrent_groups": arguments.concurrent or groups,
                    },
                    "engine": {
                        "urls": urls,
                        "max_model_len": longest,
                        "health_interval_s": arguments.fault_s / 15,
                        "health_timeout_s": arguments.fault_s / 5,
                    },
                },
                prompts=groups,
            )
            config = read_config(path)
            make_secret(config)
            ranks = RankProcesses(path, arguments.readers, arguments.processes)
            with orchestrator(path, root / "orchestrator.log") as filling:
                pids = {"orchestrator": filling.pid, "engines": engines_pid}
                pids |= {f"ranks, process {i}": process.pid for i, process in enumerate(ranks.processes)}
                watcher = Watcher(pids)
                watcher.start()
                measured = run(config, ranks, filling, arguments.train_s, watcher)
            ranks.close()
        yield from report(config, arguments, measured, predicted(config, measured, arguments.rate))


if __name__ == "__main__":
    main()
