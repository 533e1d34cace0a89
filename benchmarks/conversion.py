"""Compare conversions with a safetensors copy of the same bytes, in time and memory: python benchmarks/conversion.py

Creates a random model (Qwen2.5-1.5B's shape, bf16, 3.1 GB). Then runs the copy (`load_file`, `save_file`, fsync of
every file) and each conversion in turn, each in its own process. All tasks read files that are in the page cache, and
end when their bytes are on the disk. Imports are not timed. Peak memory is the growth of the resident set after the
imports, mapped files included. CPU seconds are comparable even on a busy machine.

    --directory DIR   directory of the files; a memory file system (/dev/shm) excludes the disk from the measurement
    --layers N        fewer layers, a smaller model
    --rounds N        runs of each task; the median is printed
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

SHAPE = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2,
    "intermediate_size": 8960, "vocab_size": 151936, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
SHARD_BYTES = 800_000_000
TASKS = (
    "copy", "hf-to-megatron tp1 pp2", "hf-to-megatron tp2 pp2", "megatron-to-hf", "hf-to-hf", "hf-to-hf, to fp8",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        print(json.dumps(run_task(arguments.task, arguments.directory)))
        return
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="conversion-") as root:
        compare(Path(root), arguments.layers, arguments.rounds)


def compare(root: Path, layers: int, rounds: int) -> None:
    import torch

    from dppo_megatron.hf import make_random_hf_model

    config = {**SHAPE, "num_hidden_layers": layers}
    tiny = {**config, "num_hidden_layers": 2, "hidden_size": 96, "intermediate_size": 96, "vocab_size": 64}
    for name, shape in (("hf", config), ("tiny", tiny)):
        make_random_hf_model(root / name, shape, seed=0, dtype=torch.bfloat16, shard_bytes=SHARD_BYTES)
    for name, megatron in (("hf", "megatron"), ("tiny", "tiny-megatron")):
        do("hf-to-megatron tp1 pp2", root / name, root, root / megatron)
    size = sum(file.stat().st_size for file in (root / "hf").glob("*.safetensors"))
    largest = max(file.stat().st_size for file in (root / "hf").glob("*.safetensors"))
    results: dict[str, list[dict[str, float]]] = {task: [] for task in TASKS}
    for _ in range(rounds):
        for task in TASKS:
            warm(root / "megatron" if task == "megatron-to-hf" else root / "hf")
            command = [sys.executable, __file__, "--task", task, "--directory", str(root)]
            results[task].append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
            done = results[task][-1]
            cost = f"{done['seconds']:.2f} s ({done['cpu']:.2f} of CPU)"
            line = f"{task}: {cost}, peak {done['peak'] / 1e9:.2f} GB, shard {done['shard'] / 1e9:.2f} GB"
            print(line, file=sys.stderr, flush=True)
    print_machine()
    shape = f"{size / 1e9:.2f} GB in bf16, {layers} layers, largest HF file {largest / 1e9:.2f} GB"
    print(f"{shape}, medians of {rounds}\n")
    columns = ("seconds", "GB/s read", "of copy", "CPU s", "of copy", "peak GB", "largest shard GB")
    print(f"{'task':<24}" + "".join(f"{name:>{len(name) + 3}}" for name in columns))
    copy, copy_cpu = (statistics.median(r[what] for r in results["copy"]) for what in ("seconds", "cpu"))
    for task, runs in results.items():
        seconds = statistics.median(r["seconds"] for r in runs)
        cpu = statistics.median(r["cpu"] for r in runs)
        peak = max(r["peak"] for r in runs)
        print(
            f"{task:<24}{seconds:>10.2f}{size / 1e9 / seconds:>12.2f}{copy / seconds:>9.2f}x{cpu:>8.2f}"
            f"{copy_cpu / cpu:>9.2f}x{peak / 1e9:>10.2f}{runs[0]['shard'] / 1e9:>19.2f}"
        )


def run_task(task: str, root: Path) -> dict[str, float]:
    """Run `task` in this process, keeping only files that later tasks read. Return seconds, memory and shard bytes."""
    import torch

    torch.set_num_threads(1)
    target = root / "out"
    do(task, root / "tiny", root / "tiny-megatron", target)  # its lazy imports are then neither timed nor counted
    shutil.rmtree(target)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    started, worked = time.perf_counter(), time.process_time()
    do(task, root / "hf", root / "megatron", target)
    seconds, cpu = time.perf_counter() - started, time.process_time() - worked
    peak = resident("VmHWM") - before
    shard = max(file.stat().st_size for pattern in ("*.safetensors", "*.distcp") for file in target.glob(pattern))
    shutil.rmtree(target)
    return {"seconds": seconds, "cpu": cpu, "peak": peak, "shard": shard}


def do(task: str, hf: Path, megatron: Path, target: Path) -> None:
    from dppo_megatron.convert.job import ConversionWorker, convert
    from dppo_megatron.convert.layout import TargetLayout
    from dppo_megatron.convert.to_hf import ToHF
    from dppo_megatron.convert.to_megatron import ToMegatron

    if task == "copy":
        copy(hf, target)
        return
    builders = {
        "hf-to-megatron tp1 pp2": partial(ToMegatron, hf, target, TargetLayout(1, 2)),
        "hf-to-megatron tp2 pp2": partial(ToMegatron, hf, target, TargetLayout(2, 2)),
        "megatron-to-hf": partial(ToHF, megatron, target, hf, shard_bytes=SHARD_BYTES),
        "hf-to-hf": partial(ToHF, hf, target, hf, shard_bytes=SHARD_BYTES),
        "hf-to-hf, to fp8": partial(ToHF, hf, target, hf, quantization="fp8_block", shard_bytes=SHARD_BYTES),
    }
    convert(builders[task], worker=ConversionWorker())


def copy(source: Path, target: Path) -> None:
    """Copy with safetensors only: load and save every file as a whole."""
    from safetensors.torch import load_file, save_file

    target.mkdir()
    for file in sorted(source.glob("*.safetensors")):
        save_file(load_file(file), target / file.name, metadata={"format": "pt"})
        with open(target / file.name, "rb") as written:
            os.fsync(written.fileno())


def warm(directory: Path) -> None:
    """Read every file once, so that each task finds it in the page cache."""
    block = bytearray(1 << 24)
    for file in directory.iterdir():
        if file.is_file():
            with file.open("rb", buffering=0) as opened:
                while opened.readinto(block):
                    pass


def resident(field: str) -> int:
    """Return the resident bytes of this process: now (VmRSS) or at their peak (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def print_machine() -> None:
    import safetensors
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.processor())
    print(f"{model}, {os.cpu_count()} cores; torch {torch.__version__}, safetensors {safetensors.__version__}")


if __name__ == "__main__":
    main()
