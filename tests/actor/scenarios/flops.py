"""Count the FLOPs of real models by operator while they score and train."""

from __future__ import annotations

from collections import Counter

from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.support.actor_cases import pack, sequences
from tests.support.actor_ranks import Rank

from .parts import topk

LENGTH, COUNT = 24, 3
MODELS = {"qwen3": {}, "qwen3_moe": {}, "deepseek": {}, "moonlight": {}, "glm4_moe": {}, "lora": {"lora": {"r": 4}}}


def batch():
    """COUNT sequences of LENGTH tokens, all but the last of each with loss."""
    parts = [s for s in sequences(40) if len(s["token_ids"]) >= LENGTH][:COUNT]
    cut = [{name: value[:LENGTH].clone() for name, value in part.items()} for part in parts]
    for part in cut:
        part["mask"][:-1], part["mask"][-1] = True, False
    return pack(cut)


def counted(run: Rank) -> dict[str, dict[str, dict[str, int]]]:
    """By model: FLOPs of a scoring pass and of an update, by operator. Attention is a product of matrices (bmm)."""
    found = {}
    for name, settings in MODELS.items():
        with run.actor("qwen3" if name == "lora" else name, settings=settings) as actor:
            found[name] = {
                "forward": _flops(lambda actor=actor: actor.logprobs([batch()])),
                "update": _flops(lambda actor=actor: actor.train_update([batch()], topk())),
            }
    return found


def _flops(call) -> dict[str, int]:
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call()
    by_operator = counter.get_flop_counts()["Global"]
    return dict(Counter({str(operator).removeprefix("aten."): count for operator, count in by_operator.items()}))
