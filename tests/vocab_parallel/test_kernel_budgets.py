"""Budgets of the kernels' machine code, for GPUs that this machine need not have."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
APART = Path(sys.prefix) / "triton-interpreter"
OWNED = {("3.7.1", 100): (42, 42), ("3.8.0", 100): (40, 44)}
"""Instructions for an owned id, with at most 64 ids a row and with more, by Triton (of torch 2.13 and 2.14, which
engines bring) and compute capability. All others: 40 and 42, as with 3.9.0, which CI has."""


@pytest.fixture(scope="module")
def counts() -> list[dict]:
    # A process of its own: on a machine without a GPU Triton lies apart (see test_triton_backend.py).
    command = [sys.executable, "-W", "ignore", ROOT / "benchmarks" / "kernels.py", "--json", "--dtypes", "bf16"]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None and not APART.exists(),
    reason=f"triton is not installed, nor in {APART}; `make install` puts it there",
)
def test_budgets(counts: list[dict]) -> None:
    assert {(c["kernel"], c["capability"]) for c in counts} == {
        (kernel, capability) for kernel in ("forward", "backward") for capability in (80, 90, 100)
    }
    for c in counts:
        assert c["spills"] == 0, c
        if c["kernel"] == "forward":
            assert c["per_logit"] <= 13, c
            # Of a single id the loop is unrolled into the tile.
            assert (c["owned"] is None) == (c["topk"] == 1), c
            owned = OWNED.get((c["triton"], c["capability"]), (40, 42))[c["topk"] > 64]
            assert c["topk"] == 1 or c["owned"] <= owned, c
        else:
            # All the code there is, that for owned ids included, which is in no loop: 341 and at most 40 more.
            assert c["tile"] <= 341 + (40 if c["topk"] > 32 else 0), c
