"""Estimate the cost of the Triton kernels on a GPU from their machine code, without a GPU and without timing.

    python benchmarks/kernels.py                 budgets and rooflines for A100, H100, H200 and B200
    python benchmarks/kernels.py --json          only the counts, one JSON object

Compiles the forward and backward kernels for compute capability 8.0, 9.0 and 10.0 with the ptxas of the triton package,
disassembles them, and counts instructions per thread. It counts them for a tile of the vocabulary without top-K ids,
for each top-K id in a tile, and for spilled registers. The roofline is the largest of three times: bytes at the
memory's bandwidth, instructions at the issue rate, exponentials at their rate. It is a bound, not a measurement: no
kernel runs faster, and latency may make it slower.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

APART = Path(sys.prefix) / "triton-interpreter"  # where `make install` puts Triton on a machine without a GPU
CAPABILITIES = (80, 90, 100)
TOPK = (1, 21, 64, 128)  # only the target; K = 20 and the target; the longest of the fused merge; longer
LABEL = re.compile(r"\s*(\.L_\w+):")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?);")
BACK = re.compile(r"BRA.*?`\((\.L_\w+)\)")


@dataclass(frozen=True)
class Gpu:
    """Data sheet figures of the SXM modules; instructions and exponentials per clock of one multiprocessor."""

    name: str
    capability: int
    bytes_per_s: float
    multiprocessors: int
    clock_hz: float
    warp_instructions: int = 4
    exponentials: int = 16


GPUS = (
    Gpu("A100-80", 80, 2.04e12, 108, 1.41e9),
    Gpu("H100-80", 90, 3.35e12, 132, 1.755e9),
    Gpu("H200-141", 90, 4.8e12, 132, 1.755e9),
    Gpu("B200", 100, 8.0e12, 148, 1.965e9),
)


@dataclass(frozen=True)
class Counts:
    """Instructions per thread.

    In the forward kernel, `tile` is for a tile without owned ids, and each owned id adds `owned`. In the backward
    kernel, `tile` includes all.
    """

    kernel: str  # "forward" | "backward"
    capability: int
    dtype: str
    topk: int  # ids per row: the target and the top-K
    entropy: bool
    columns: int  # logits of a tile
    threads: int
    tile: int
    owned: int | None
    spills: int
    registers: int

    @property
    def per_logit(self) -> float:
        return self.tile * self.threads / self.columns


def count(kernel: str, capability: int, dtype: str, topk: int, entropy: bool, columns: int = 19072) -> Counts:
    """Compile one kernel for rows of `columns` local logits and count. Needs triton and its nvdisasm, but no GPU."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dppo_megatron.vocab_parallel import triton_backend as backend

    function = backend.forward_kernel if kernel == "forward" else backend.backward_kernel
    element = {"bf16": "bf16", "fp32": "fp32"}[dtype]
    constants = {"n": topk, "n_padded": triton.next_power_of_2(topk), "tile": backend.TILE, "acc": tl.float32}
    pointers = {"logits": element, "ids": "i64", "dead": "u8"}
    numbers = {"row_stride": columns, "column_stride": 1, "first": 0, "columns": columns, "scale_stride": 1}
    if kernel == "forward":
        constants |= {"entropy": entropy, "chunk": backend.CHUNK}
        numbers["out_stride"] = topk + 3
    else:
        constants["with_b"] = entropy
    signature, attributes = {}, {}
    for place, name in enumerate(function.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in numbers:
            # A launch specializes the same way: 1 becomes a constant, and multiples of 16 are marked.
            signature[name] = "constexpr" if numbers[name] == 1 else "i32"
            if numbers[name] == 1:
                constants[name] = 1
            elif numbers[name] % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = f"*{pointers.get(name, 'fp32')}"
            attributes[(place,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(function, signature, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": backend.WARPS},
    )
    instructions, loops, registers = _disassemble(compiled.asm["cubin"])
    threads, owned = 32 * backend.WARPS, None
    tile = len(instructions)
    if kernel == "forward":
        # Two loops over owned ids (whole tiles, and the last one), the first of them inside the loop over tiles.
        begin, end = max(loops, key=lambda loop: loop[1] - loop[0])
        inner = [b - a + 1 for a, b in loops if begin < a and b < end]
        owned = max(inner, default=None)
        tile = end - begin + 1 - sum(inner)
    spills = sum(bool(re.search(r"\b(STL|LDL)\b", text)) for text in instructions)
    return Counts(kernel, capability, dtype, topk, entropy, backend.TILE, threads, tile, owned, spills, registers)


def _disassemble(cubin: bytes) -> tuple[list[str], list[tuple[int, int]], int]:
    """Return the instructions, the loops as (first, last) instruction, and the registers per thread."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tools / "nvdisasm", "-c", file.name], capture_output=True, text=True, check=True).stdout
        usage = subprocess.run([tools / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True).stdout
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := INSTRUCTION.search(line):
            instructions.append(found[1])
    branches = [(labels.get(m[1], i + 1), i) for i, text in enumerate(instructions) if (m := BACK.search(text))]
    loops = [(to, at) for to, at in branches if to < at]
    return instructions, loops, int(re.search(r"REG:(\d+)", usage)[1])


def roofline(counts: Counts, gpu: Gpu, logits: int, element_bytes: int = 2) -> dict[str, float]:
    """Return the least seconds for a pass over so many logits, for each limit."""
    warps = gpu.multiprocessors * gpu.clock_hz * gpu.warp_instructions
    moved = element_bytes if counts.kernel == "forward" else 2 * element_bytes
    return {
        "memory": logits * moved / gpu.bytes_per_s,
        "instructions": logits * counts.per_logit / 32 / warps,
        "exponentials": logits / (gpu.multiprocessors * gpu.clock_hz * gpu.exponentials),
    }


def show(found: list[Counts], rows: int, columns: int) -> None:
    print("instructions a thread; tiles of 4096 columns on 256 threads, compiled and never run")
    head = ("a tile", "a logit", "an owned id", "spills", "registers")
    print(f"{'kernel':9}{'sm':>4}{'dtype':>6}{'ids':>4} entropy" + "".join(f"{name:>12}" for name in head))
    for c in found:
        owned = "in the tile" if c.owned is None else str(c.owned)
        print(
            f"{c.kernel:9}{c.capability:>4}{c.dtype:>6}{c.topk:>4} {c.entropy!s:7} {c.tile:>12}{c.per_logit:>12.1f}"
            f"{owned:>12}{c.spills:>12}{c.registers:>12}"
        )
    print(f"\nroofline of [{rows}, {columns}] bf16 logits, 21 ids a row with entropy, no owned ids; milliseconds")
    for gpu in GPUS:
        for c in found:
            if (c.capability, c.dtype, c.topk, c.entropy) == (gpu.capability, "bf16", 21, True):
                times = {what: 1e3 * s for what, s in roofline(c, gpu, rows * columns).items()}
                limit = max(times, key=times.__getitem__)
                parts = ", ".join(f"{what} {ms:.3f}" for what, ms in times.items())
                print(f"{gpu.name:9} {c.kernel:9} {times[limit]:.3f} (limit: {limit}; {parts})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the counts as JSON, nothing else")
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "fp32"], choices=["bf16", "fp32"], help="of the logits")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--columns", type=int, default=19072, help="local logits a row: 151936 / 8, padded")
    arguments = parser.parse_args()
    if importlib.util.find_spec("triton") is None and APART.exists():
        sys.path.insert(0, str(APART))
    from triton import __version__ as version

    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"TRITON_CACHE_DIR": cache, "TRITON_DEFAULT_FP_FUSION": "1"}
        found = [
            count(kernel, capability, dtype, topk, entropy, arguments.columns)
            for capability in CAPABILITIES
            for kernel in ("forward", "backward")
            for dtype in arguments.dtypes
            for topk in TOPK
            for entropy in (False, True)
        ]
    if arguments.json:
        print(json.dumps([vars(c) | {"per_logit": c.per_logit, "triton": version} for c in found]))
    else:
        show(found, arguments.rows, arguments.columns)


if __name__ == "__main__":
    main()
