"""Measure the share of an adapter's first update that survives bf16: in outputs, in merged weights, with fp32 sums.

    python benchmarks/lora_bf16.py                  # 3 seconds on a CPU core

One layer of 1,024 x 1,024 with weights of standard deviation 0.02, r = 32 and alpha = 64. Adam's first update moves
every element of B, which starts at 0, by the learning rate. The adapter then computes (alpha / r) B A x as
`train/actor/lora.py` does. "arrives": the change of the outputs (or weights) along the exact change, over its length.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

SIZE, R, SCALING, TOKENS = 1024, 32, 64 / 32, 512
RATES = (1e-5, 1e-4, 1e-3)


def arrives(after: Tensor, before: Tensor, exact: Tensor) -> str:
    change = after.float() - before.float()
    return f"{float((change * exact).sum() / exact.square().sum()):8.1%}"


def measure(rate: float) -> str:
    torch.manual_seed(0)
    weight = (0.02 * torch.randn(SIZE, SIZE)).bfloat16()
    a = torch.empty(R, SIZE).uniform_(-(SIZE**-0.5), SIZE**-0.5).bfloat16()
    b = (rate * torch.randn(SIZE, R).sign()).bfloat16()
    x = torch.randn(TOKENS, SIZE).bfloat16()
    exact = SCALING * linear(linear(x.float(), a.float()), b.float())
    base, base_fp32 = linear(x, weight), linear(x.float(), weight.float())
    moved = SCALING * b.float() @ a.float()
    return "  ".join(
        [
            f"{rate:6g}",
            f"{float(exact.abs().mean() / base_fp32.abs().mean()):8.1e}",
            arrives(base + linear(linear(x, a) * SCALING, b), base, exact),
            arrives((weight.float() + moved).bfloat16(), weight, moved),
            arrives((base.float() + exact).bfloat16(), base, exact),
            arrives((base_fp32 + exact).bfloat16(), base_fp32.bfloat16(), exact),
        ]
    )


if __name__ == "__main__":
    print("                    -- arrives: --------------------------------------")
    print("    lr    change  adapter    merged   fp32 sum   fp32 product and sum")
    for rate in RATES:
        print(measure(rate), flush=True)
