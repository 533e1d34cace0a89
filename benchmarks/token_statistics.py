"""Measure time and memory of per-token statistics on vocab-parallel logits, for our code and other projects' code.

    python benchmarks/token_statistics.py                   CPU, gloo, 2 ranks
    python benchmarks/token_statistics.py --vocab 151936 --dtype bf16 --only ours,megatron
    python benchmarks/token_statistics.py --batch-invariant --only linear   the cost of a batch-invariant head
    python benchmarks/token_statistics.py --device cuda     one GPU, the shard of one rank at tp 1, 2, 4, 8

CPU: runs every implementation that can be imported, and prints the reason for the others. Repeats alternate between the
implementations, so that a busy machine slows all of them equally. Time is forward plus backward on the slowest rank:
the median and the minimum over the repeats. Memory is the growth of the peak resident set during forward plus backward,
beyond the logits, per local logit, on the largest rank. It is measured in separate processes with an allocator that
returns freed memory at once.
CUDA: the bandwidth, counting 6 bytes per logit in bf16 (read, read, write), compared with a copy in the same run.
Megatron, verl, slime and NeMo-RL are called as installed; none of their code is copied here.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from token_statistics_peers import IMPLEMENTATIONS, Case

from dppo_megatron.vocab_parallel import batch_invariant_logits, linear_token_statistics, token_statistics

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
REFERENCE = "megatron fused"
INVARIANT = ", invariant"


# --- measuring ---


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{field} is not in /proc/self/status")


def peak_growth(run: Callable[[], None]) -> int:
    """Return the largest growth of the resident set during run(), in bytes. Works only on Linux."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the recorded peak
    before = _resident("VmRSS:")
    run()
    return max(0, _resident("VmHWM:") - before)


def one_pass(implementation: Callable[[Tensor, Case], list[Tensor]], logits: Tensor, case: Case) -> None:
    outputs = implementation(logits, case)
    sum((output * case.weight).sum() for output in outputs).backward()


def make_case(rank: int, args: argparse.Namespace, vocab: int, dtype: torch.dtype) -> Case:
    generator = torch.Generator().manual_seed(vocab)
    target = torch.randint(0, vocab, (args.tokens,), generator=generator)
    topk = torch.rand(args.tokens, 4 * args.topk, generator=generator).mul_(vocab).long()[:, : args.topk].contiguous()
    weight = torch.randn(args.tokens, generator=generator)
    columns = -(-vocab // (128 * args.tp)) * 128
    generator.manual_seed(vocab + rank)
    logits = (torch.randn(args.tokens, columns, generator=generator) * 3).to(dtype)
    return Case(target, topk, weight, vocab, rank * columns, logits, dist.group.WORLD)


def _slowest(value: float) -> float:
    worst = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


def worker(rank: int, args: argparse.Namespace, vocab: int, dtype: str, phase: str, folder: str) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(args.threads)
    store = dist.FileStore(f"{folder}/store", args.tp)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.tp)
    try:
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(tensor_model_parallel_size=args.tp)
    except ImportError:
        pass  # each implementation that needs it reports so
    prepared = logits_passes(rank, args, vocab, dtype) | linear_passes(args, vocab, dtype)
    rows = [{"vocab": vocab, "dtype": dtype} | row for row in measure(prepared, args, phase)]
    if rank == 0:
        Path(f"{folder}/rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


@dataclass(frozen=True)
class Entry:
    """One implementation. prepare() returns one pass to time. results: bytes of its gradients, not counted."""

    gives: str
    logits: int
    results: int
    prepare: Callable[[], Callable[[], None]]


Prepared = dict[str, Entry]


def logits_passes(rank: int, args: argparse.Namespace, vocab: int, dtype: str) -> Prepared:
    case = make_case(rank, args, vocab, DTYPES[dtype])

    def prepare(implementation: Callable[[Tensor, Case], list[Tensor]]) -> Callable[[], None]:
        return partial(one_pass, implementation, case.make_logits(), case)

    return {
        name: Entry(gives, case.logits.numel(), 0, partial(prepare, implementation))
        for name, (implementation, gives) in IMPLEMENTATIONS.items()
        if not args.only or any(part in name for part in args.only)
    }


def linear_passes(args: argparse.Namespace, vocab: int, dtype: str) -> Prepared:
    """Return passes of head and statistics together, with stored logits and with logits that are never stored.

    Memory excludes the gradients of hidden and weight, which every head returns, but includes stored logits.
    """
    torch.manual_seed(0)
    columns = -(-vocab // (128 * args.tp)) * 128
    hidden = torch.randn(args.tokens, args.hidden).to(DTYPES[dtype]).requires_grad_()
    weight = torch.randn(columns, args.hidden).mul_(args.hidden**-0.5).to(DTYPES[dtype]).requires_grad_()
    target = torch.randint(0, vocab, (args.tokens,))
    topk = torch.randint(0, vocab, (args.tokens, args.topk))
    half = torch.arange(args.tokens) % 2 == 0
    group = dist.group.WORLD

    def run(kind: str, invariant: bool) -> None:
        if kind == "stored":
            # The plain product does not reduce the hidden gradient.
            logits = batch_invariant_logits(hidden, weight, group) if invariant else hidden @ weight.t()
            stats = token_statistics(logits, target, topk, vocab, group=group)
        else:
            options = {"loss_mask": half if kind == "half" else None, "batch_invariant": invariant}
            stats = linear_token_statistics(hidden, weight, target, topk, vocab, group=group, **options)
        stats.logprob.sum().backward()

    def prepare(kind: str, invariant: bool) -> Callable[[], None]:
        hidden.grad = weight.grad = None
        return partial(run, kind, invariant)

    kinds = {
        "linear, logits stored": "stored",
        "linear, never stored": "fused",
        "linear, never stored, half the tokens": "half",
    }
    gives = f"with the head, H = {args.hidden}"
    results = hidden.nbytes + weight.nbytes
    return {
        name + suffix: Entry(gives, args.tokens * columns, results, partial(prepare, kind, invariant))
        for name, kind in kinds.items()
        for suffix, invariant in (("", False), (INVARIANT, True))
        if not args.only or any(part in name for part in args.only)
        if args.batch_invariant or not invariant
    }


def measure(prepared: Prepared, args: argparse.Namespace, phase: str) -> list[dict[str, Any]]:
    rows = {name: {"name": name, "gives": entry.gives} for name, entry in prepared.items()}
    alive: Prepared = {}
    for name, entry in prepared.items():
        try:
            for _ in range(2):  # compilations
                entry.prepare()()
            alive[name] = entry
        except Exception as error:
            rows[name]["absent"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if phase == "memory":
        for name, entry in alive.items():
            grown = _slowest(max(0, peak_growth(entry.prepare()) - entry.results))
            rows[name] |= {"bytes": grown, "bytes_per_logit": grown / entry.logits}
        return list(rows.values())
    times: dict[str, list[float]] = {name: [] for name in alive}
    for _ in range(args.repeats):
        for name, entry in alive.items():
            run = entry.prepare()
            dist.barrier()
            start = time.perf_counter()
            run()
            times[name].append(_slowest(time.perf_counter() - start))
    for name, found in times.items():
        rows[name] |= {"seconds": statistics.median(found), "fastest": min(found)}
    return list(rows.values())


def run_cpu(args: argparse.Namespace, vocab: int, dtype: str) -> list[dict[str, Any]]:
    merged: dict[str, dict[str, Any]] = {}
    # The allocator reads this when a process starts, and then returns freed blocks at once.
    returning = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    for phase in ("time", "memory"):
        for name, value in returning.items():
            if phase == "memory":
                os.environ[name] = value
            else:
                os.environ.pop(name, None)
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(worker, (args, vocab, dtype, phase, folder), args.tp)
            for row in json.loads(Path(folder, "rows.json").read_text()):
                merged.setdefault(row["name"], {}).update(row)
    return list(merged.values())


# --- CUDA ---


def _cuda_ms(run: Callable[[], None], repeats: int) -> float:
    times = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])


def _copy_bandwidth(device: torch.device, repeats: int) -> float:
    """Return bytes read and written per second."""
    source = torch.zeros(1 << 30, dtype=torch.uint8, device=device)
    sink = torch.empty_like(source)
    return 2 * source.numel() / (_cuda_ms(lambda: sink.copy_(source), repeats) * 1e-3)


def run_cuda(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the shard sizes of tp 1, 2, 4, 8 on one GPU, without collectives. Times include both passes."""
    device, found = torch.device("cuda"), []
    copy = _copy_bandwidth(device, args.repeats)
    for vocab in args.vocab:
        for tp in (1, 2, 4, 8):
            for dtype in args.dtype:
                columns = -(-vocab // (128 * tp)) * 128
                z = (torch.randn(args.tokens, columns, device=device) * 3).to(DTYPES[dtype])
                target = torch.randint(0, columns, (args.tokens,), device=device)
                topk = torch.randint(0, columns, (args.tokens, args.topk), device=device)
                for name, options in (
                    ("auto", {}),
                    ("auto, unchecked", {"check": False}),
                    ("torch", {"backend": "torch"}),
                    ("all differentiable", {"entropy": "differentiable", "check": False}),
                ):

                    def run(z: Tensor = z, options: dict[str, Any] = options) -> None:
                        logits = z.detach().requires_grad_()
                        # After the first pass the values are gradients, which are sufficient for timing.
                        stats = token_statistics(logits, target, topk, inplace=True, **options)  # noqa: B023
                        stats.logprob.sum().backward()

                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                    run()
                    grown = torch.cuda.max_memory_allocated() - before
                    ms = _cuda_ms(run, args.repeats)
                    traffic = 3 * z.numel() * z.element_size()
                    found.append(
                        {
                            "vocab": vocab,
                            "tp": tp,
                            "dtype": dtype,
                            "name": name,
                            "ms": ms,
                            "of_copy": traffic / (ms * 1e-3) / copy,
                            "bytes_per_logit": grown / z.numel(),
                            "copy_bytes_per_s": copy,
                        }
                    )
                del z
    return found


# --- report ---


def header(args: argparse.Namespace) -> str:
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        model = next(
            (line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line),
            model,
        )
    device = torch.cuda.get_device_name() if args.device == "cuda" else f"{model}, {os.cpu_count()} cores"
    versions = [f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    warnings.filterwarnings("ignore")
    for package in ("megatron.core", "triton"):
        try:
            versions.append(f"{package} {importlib.import_module(package).__version__}")
        except ImportError:
            versions.append(f"{package} absent")
    load = f"load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    ranks = "one process" if args.device == "cuda" else f"TP {args.tp}, {args.threads} thread(s) a rank"
    return f"{device}; {', '.join(versions)}; {ranks}, T = {args.tokens}, K = {args.topk}; {load}"


def report_cpu(block: list[dict[str, Any]], vocab: int, dtype: str) -> None:
    seconds = {row["name"]: row["seconds"] for row in block if "seconds" in row}
    print(f"\nV = {vocab}, {dtype}; times in units of Megatron's fused cross-entropy and of ours")
    print(
        f"{'implementation':38} {'median s':>9} {'best s':>7} {'x fused':>8} {'x ours':>7} "
        f"{'B/logit':>8} {'MB':>7}  gives"
    )
    for row in block:
        if "seconds" not in row:
            print(f"{row['name']:38} not run: {row.get('absent', 'failed')[:120]}")
            continue
        ratios = [f"{row['seconds'] / seconds[base]:.2f}" if base in seconds else "-" for base in (REFERENCE, "ours")]
        memory = [row.get(key, float("nan")) for key in ("bytes_per_logit", "bytes")]
        print(
            f"{row['name']:38} {row['seconds']:9.3f} {row['fastest']:7.3f} {ratios[0]:>8} {ratios[1]:>7} "
            f"{memory[0]:8.3f} {memory[1] / 1e6:7.1f}  {row['gives']}"
        )
    for name, found in seconds.items():
        if name.endswith(INVARIANT):
            plain = name.removesuffix(INVARIANT)
            print(f"{plain}: batch-invariant takes {found / seconds[plain]:.2f} x the time")
    sys.stdout.flush()


def report_cuda(rows: list[dict[str, Any]]) -> None:
    print(f"copy: {rows[0]['copy_bytes_per_s'] / 1e12:.2f} TB/s")
    print(f"{'V':>7} {'tp':>3} {'dtype':5} {'backend':20} {'ms':>8} {'of copy':>8} {'B/logit':>8}")
    for row in rows:
        print(
            f"{row['vocab']:7} {row['tp']:3} {row['dtype']:5} {row['name']:20} {row['ms']:8.3f} "
            f"{row['of_copy']:8.1%} {row['bytes_per_logit']:8.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokens", type=int, help="T (2048, on CUDA 8192)")
    parser.add_argument("--vocab", type=int, nargs="+", help="V (32768 151936, on CUDA 151936)")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", help="dtypes of the logits (bf16 fp32, on CUDA bf16)")
    parser.add_argument("--topk", type=int, default=20, help="K")
    parser.add_argument("--tp", type=int, default=2, help="ranks, CPU only")
    parser.add_argument("--threads", type=int, default=1, help="torch threads per rank, CPU only")
    parser.add_argument("--hidden", type=int, default=256, help="H of the linear rows")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", type=lambda text: text.split(","), help="parts of names, comma-separated")
    parser.add_argument(
        "--batch-invariant", action="store_true", help="also measure batch-invariant linear rows, CPU only"
    )
    parser.add_argument("--json", help="also write the rows to this file")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    args.tokens = args.tokens or (8192 if cuda else 2048)
    args.vocab = args.vocab or ([151936] if cuda else [32768, 151936])
    args.dtype = args.dtype or (["bf16"] if cuda else ["bf16", "fp32"])
    if cuda and not torch.cuda.is_available():
        parser.error("--device cuda: no CUDA device is available here")
    text = header(args)
    print(text, flush=True)
    rows = []
    if cuda:
        rows = run_cuda(args)
        report_cuda(rows)
    else:
        for vocab, dtype in product(args.vocab, args.dtype):
            block = run_cpu(args, vocab, dtype)
            report_cpu(block, vocab, dtype)
            rows += block
    if args.json:
        Path(args.json).write_text(json.dumps({"machine": text, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
