"""Makes tiny models that answer any prompt with a digit in a box."""

import random
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from dppo_megatron.hf import make_random_hf_model
from tests.support.actor_cases import MOE, TINY
from tests.support.tokenizers import CHAT, save_character_model

DIGITS = "0123"  # each digit is the answer with probability of about 1/4, for any prompt
PAD, EOS = 0, 1
DENSE = TINY["answering"]
EXPERTS = DENSE | MOE | {"head_dim": 32, "moe_intermediate_size": 32, "mlp_only_layers": []}


def make_model(directory: Path, config: dict[str, Any], *, updates: int = 50) -> Path:
    """Write weights, tokenizer and chat template, after a few seconds of supervised training on one core."""
    start = directory.with_name("random")
    make_random_hf_model(start, config, seed=1)
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(save_character_model(directory, chat_template=CHAT))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    rng = random.Random(1)
    for _ in range(updates):
        loss = _loss(model, [_example(tokenizer, digit, rng) for digit in DIGITS * 2])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(directory)
    return directory


def _example(tokenizer: Any, digit: str, rng: random.Random) -> tuple[list[int], int]:
    """Return (tokens of a random prompt and its answer, index at which the answer begins)."""
    prompt = "<user>" + "".join(rng.choices("What is 0123456789+?\n", k=rng.randrange(20, 60))) + "<bot>"
    ids, answer = (tokenizer(text)["input_ids"] for text in (prompt, rf"\boxed{{{digit}}}"))
    return [*ids, *answer, EOS], len(ids)


def _loss(model: Any, examples: list[tuple[list[int], int]]) -> torch.Tensor:
    width = max(len(ids) for ids, _ in examples)
    ids = torch.tensor([row + [PAD] * (width - len(row)) for row, _ in examples])
    starts, ends = (
        torch.tensor(values)[:, None] for values in ([s for _, s in examples], [len(r) for r, _ in examples])
    )
    place = torch.arange(1, width)
    answered = (place >= starts) & (place < ends)
    return cross_entropy(model(ids).logits[:, :-1][answered], ids[:, 1:][answered])
