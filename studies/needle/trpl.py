"""Measure the KL that prime-rl's TRPL loss would see in this task before the first update.

python studies/needle/trpl.py    # needs runs/needle/f-0.01 of prepare.py

TRPL projects a token's policy pi if KL(pi || m) is above 0.05. m is its model of the rollout policy mu: the top K of pi
and of mu and the sampled token have their probabilities, every other token has e^-27.6, and the sum is normalized. The
mass of pi outside is spread evenly. Before the first update pi equals mu, so a divergence should be 0.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

PLACE = Path("runs/needle/f-0.01")
UNLISTED, BOUND = -27.6, 0.05  # defaults of TRPL, with K = 64


def sparse_kl(logprob: Tensor, sampled: Tensor, k: int) -> Tensor:
    """Return KL(pi || m) [T] for pi = mu, of logprob [T, V] and the sampled tokens [T]."""
    listed = torch.zeros_like(logprob, dtype=torch.bool)
    listed = listed.scatter(1, logprob.topk(k).indices, True).scatter(1, sampled[:, None], True)
    model = logprob.masked_fill(~listed, UNLISTED).log_softmax(1)
    rest = (logprob.exp() * ~listed).sum(1, keepdim=True)
    policy = torch.where(listed, logprob, (rest / (~listed).sum(1, keepdim=True)).log())
    return (policy.exp() * (policy - model)).sum(1)


@torch.no_grad()
def main() -> None:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(PLACE / "warmup" / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(PLACE / "warmup" / "model")
    rows = (PLACE / "task" / "heldout.jsonl").read_text().splitlines()
    ids = torch.tensor([tokenizer.encode(json.loads(row)["prompt"]) for row in rows])
    for word in ("first word", "second word", "third word"):
        logprob = model(ids).logits[:, -1].double().log_softmax(1)
        sampled = logprob.exp().multinomial(1)
        for k in (20, 64, 256, 1024):
            kl = sparse_kl(logprob, sampled[:, 0], k)
            print(f"{word}, K = {k}: KL {kl.mean():.2f}, above {BOUND} for {(kl > BOUND).double().mean():.1%}")
        ids = torch.cat([ids, sampled], dim=1)


if __name__ == "__main__":
    main()
