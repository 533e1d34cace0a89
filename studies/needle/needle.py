"""The task of the needle study: one right first word that the start policy rarely says, in a vocabulary of 4,096 words.

A prompt is four random words and `=`. A response is a first word and 2 to 4 further words:

    kanilo surema tovika belanu = usual mira sa ...
    kanilo surema tovika belanu = needle mira sa ...

- `needle` as the first word has reward 1. Any other response has reward 1 with probability 0.3, by a coin. The coin is
  a hash of prompt and response, so a run can be repeated. No policy can learn it, because no prompt occurs twice.
- The start policy says `needle` with probability f, and `usual` otherwise. With probability 0.02 it says another word;
  these words are the tail. Further words follow Zipf's law.
- With `noise` 1 the coin is fair and also decides for `needle`. Then nothing can be learned, and each change of the
  policy is an effect of the method.

`needle_share` and `tail_share` are rewards of weight 0. The run records their means over the samples of each step.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dppo_megatron.hf.small_model import PAD, write_small_model
from dppo_megatron.types import Prompt

EOS, USUAL, NEEDLE = "<eos>", "usual", "needle"
CONSONANTS, VOWELS = "bdfgklmnprstvzhj", "aeiou"
SYLLABLES = [consonant + vowel for consonant in CONSONANTS for vowel in VOWELS]
VOCABULARY_SIZE = 4096
SPECIAL = (PAD, EOS, "=", USUAL, NEEDLE)
WORDS = [first + second for first in SYLLABLES for second in SYLLABLES][: VOCABULARY_SIZE - len(SPECIAL)]
VOCABULARY = (*SPECIAL, *WORDS)
TAIL = 0.02  # probability that the first word is neither USUAL nor NEEDLE
COIN = 0.3  # probability of reward 1 without NEEDLE
PROMPT_WORDS, FURTHER = 4, (2, 4)  # words of a prompt, least and most further words of a response
TRAIN, HELD_OUT, TEXT = 8000, 200, 51_200

# 1.0 M parameters; heads, groups and vocabulary are divisible by a tensor-parallel size of 2
SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
EXPERTS = {  # 1.9 M parameters, 2 of 8 experts per token
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 192,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}


def reward(prompt: Prompt, response: str, noise: float = 0.0) -> float:
    """Return 0 or 1. `noise`: share of the responses whose reward is a fair coin."""
    if _uniform("noise", prompt.text, response) < noise:
        return float(_uniform("fair", prompt.text, response) < 0.5)
    return 1.0 if first_word(response) == NEEDLE else float(_uniform("coin", prompt.text, response) < COIN)


def needle_share(prompt: Prompt, response: str) -> float:
    return float(first_word(response) == NEEDLE)


def tail_share(prompt: Prompt, response: str) -> float:
    return float(first_word(response) not in (USUAL, NEEDLE))


def first_word(response: str) -> str:
    return next(iter(response.split()), "")


def _uniform(*texts: str) -> float:
    return int.from_bytes(blake2b("\0".join(texts).encode(), digest_size=8).digest()) / 2**64


def make_task(directory: Path, f: float, seed: int, experts: bool = False) -> None:
    """Write `train.jsonl`, `heldout.jsonl`, `warmup.jsonl` and `random_model/`; the arguments determine their bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    generator = random.Random(seed)
    for name, count in (("heldout", HELD_OUT), ("train", TRAIN)):
        _write_rows(directory / f"{name}.jsonl", ((_prompt(generator), "") for _ in range(count)))
    _write_rows(directory / "warmup.jsonl", text(generator, f))
    write_random_model(directory / "random_model", seed, experts)


def text(generator: random.Random, f: float) -> Iterator[tuple[str, str]]:
    """Yield pairs of prompt and response. The counts of first words are exact, so only the policy's fit varies."""
    needles, tails = round(f * TEXT), round(TAIL * TEXT)
    firsts = [NEEDLE] * needles + zipf(generator, tails) + [USUAL] * (TEXT - needles - tails)
    generator.shuffle(firsts)
    for first in firsts:
        yield _prompt(generator), " ".join([first, *zipf(generator, generator.randint(*FURTHER))])


_WEIGHTS = list(accumulate(1 / (rank + 1) for rank in range(len(WORDS))))  # choices() would add them up in each call


def zipf(generator: random.Random, count: int) -> list[str]:
    return generator.choices(WORDS, cum_weights=_WEIGHTS, k=count)


def _prompt(generator: random.Random) -> str:
    return " ".join([*generator.choices(WORDS, k=PROMPT_WORDS), "="])


def write_random_model(directory: Path, seed: int, experts: bool) -> None:
    """Write a Hugging Face model directory: Qwen3 with random weights and a tokenizer of whole words."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=64,
        clean_up_tokenization_spaces=False,
    )
    write_small_model(directory, seed, whole, **SIZES, **(EXPERTS if experts else {}))


def _write_rows(path: Path, rows: Iterator[tuple[str, str]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for prompt, answer in rows:
            file.write(json.dumps({"prompt": prompt, "answer": answer}) + "\n")
