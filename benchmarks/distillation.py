"""Measure the cost of a teacher's top K in the trainer: updates of one actor with and without distillation, in turn.

    OMP_NUM_THREADS=1 python benchmarks/distillation.py [--topk 20] [--repeats 15]

Both methods are DPPO with rewards. One adds the reverse KL from a teacher's list, which its batches contain. The actor
is that of `score_centering.py`, once with stored and once with fused logits. Exits with 1 above the limit.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from score_centering import Small, arguments_of, compare, listed, print_setup

from dppo_megatron.objectives import build_objective
from dppo_megatron.types import TokenBatch


def main() -> int:
    arguments, costs = arguments_of(__doc__, topk=20), 0
    reverse_kl = {"distillation": "reverse_kl", "distillation_coefficient": 1.0}
    with tempfile.TemporaryDirectory() as name:
        day = Small("cpu", Path(name))
        methods = {
            "without": (build_objective("dppo_binary_tv", delta=0.2), day.batches()),
            "with a teacher": (
                build_objective("dppo_binary_tv", delta=0.2, **reverse_kl),
                list(map(taught, day.batches(topk=arguments.topk))),
            ),
        }
        print_setup(day, arguments)
        for logits in ("stored", "fused"):
            with day.actor(model={"dtype": "fp32", "logits": logits}) as actor:
                costs |= compare(actor, methods, arguments.repeats, f"{logits} logits: the teacher")
    return costs


def taught(batch: TokenBatch) -> TokenBatch:
    """Return the batch with its lists as those of a teacher."""
    batch = listed(batch)
    columns = {
        "teacher_logprob": batch.rollout_logprob - 9.0,
        "teacher_ids": batch.topk_ids,
        "teacher_topk_logprob": batch.rollout_topk_logprob,
    }
    return replace(batch, topk_ids=None, rollout_topk_logprob=None, extra=columns)


if __name__ == "__main__":
    sys.exit(main())
