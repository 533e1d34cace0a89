"""The task of the studies: chains of sums, solved step by step in words, and a text of careless solutions.

A prompt is a number followed by operations, `1 7 + 5 - 8 + 9 =`, with one token for each digit. The response solves one
operation at a time, modulo 100. A linking word precedes each step:

    soso 1 7 + 5 = 2 2 nuta 2 2 - 8 = 1 4 sove 1 4 + 9 = 2 3 answer 2 3

The task is a miniature of reasoning by language models:

- When a sum carries a ten, the text often forgets it, and a policy trained on the text does the same. Some samples of
  every prompt are right. The reward depends only on the last number and teaches care. The text never forgets tens in
  differences: otherwise two mistakes would cancel, and a policy that forgets more often would be right about as often.
- Linking words do not affect the answer. They follow Zipf's law like the words of a language: the r-th most frequent
  one has a probability near 1 / r. Every position therefore has many rare tokens, which a trust region may restrict.
- After one of the rare words, `carefully`, the step is always right. A policy finds this useful habit only through a
  token of low probability.

Level `easy` has 8 operations with numbers below 10 (68 tokens a response), level `hard` 20 with numbers below 50 (184
tokens). `hard` has more tens to carry, so its text forgets a smaller share of them. On both levels about a quarter of
the answers is right.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dppo_megatron.hf.small_model import PAD, write_small_model

EOS, CAREFULLY, ANSWER = "<eos>", "carefully", "answer"
MODULUS = 100
SYLLABLES = ("so", "nu", "ta", "li", "ve", "mo", "ri", "da", "ke", "pu", "ho")
WORDS = [first + second for first in SYLLABLES for second in SYLLABLES]  # 121, the most frequent first
CAREFUL_RANK = 10  # index of `carefully` in WORDS: 1.7 % of the linking words
VOCABULARY = (PAD, EOS, "+", "-", "=", ANSWER, CAREFULLY, *"0123456789", *WORDS)
TRAIN, HELD_OUT, TEXT = 4000, 200, 12000  # prompts to train on and to evaluate, and worked examples in the text

# 1.3 M parameters; heads, groups and vocabulary are divisible by a tensor-parallel size of 2
WIDER = {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 6}


@dataclass(frozen=True)
class Level:
    operations: int
    largest: int  # largest number added or subtracted
    forgotten: float  # share of carried tens that the text forgets


LEVELS = {"easy": Level(8, 9, 0.6), "hard": Level(20, 49, 0.3)}


@dataclass(frozen=True)
class Chain:
    start: int
    operations: tuple[tuple[str, int], ...]
    places: int  # digits of an added or subtracted number

    @property
    def prompt(self) -> str:
        return " ".join([digits(self.start, 2), *(f"{sign} {self._number(n)}" for sign, n in self.operations), "="])

    @property
    def answer(self) -> str:
        value = self.start
        for sign, number in self.operations:
            value = right(value, sign, number)
        return digits(value, 2)

    def worked_out(self, generator: random.Random, forgotten: float) -> str:
        """Return the steps in words. They forget the share `forgotten` of carried tens, except after `carefully`."""
        value, words = self.start, []
        for sign, number in self.operations:
            word = linking_word(generator)
            slips = word != CAREFULLY and generator.random() < forgotten
            result = (careless if slips else right)(value, sign, number)
            words += [word, digits(value, 2), sign, self._number(number), "=", digits(result, 2)]
            value = result
        return " ".join([*words, ANSWER, digits(value, 2)])

    def _number(self, number: int) -> str:
        return digits(number, self.places)


def digits(number: int, places: int) -> str:
    return " ".join(f"{number:0{places}d}")


def right(value: int, sign: str, number: int) -> int:
    return (value + number if sign == "+" else value - number) % MODULUS


def careless(value: int, sign: str, number: int) -> int:
    """Return the result without the carry. It equals `right` for differences and for sums that carry nothing."""
    if sign == "-":
        return right(value, sign, number)
    tens, ones = divmod(value, 10)
    more_tens, more_ones = divmod(number, 10)
    return (tens + more_tens) % 10 * 10 + (ones + more_ones) % 10


_RANKED = [*WORDS[:CAREFUL_RANK], CAREFULLY, *WORDS[CAREFUL_RANK:]]
_FREQUENCY = [1 / (rank + 1) for rank in range(len(_RANKED))]


def linking_word(generator: random.Random) -> str:
    return generator.choices(_RANKED, _FREQUENCY)[0]


def chains(level: Level, generator: random.Random) -> Iterator[Chain]:
    """Yield distinct random chains without end."""
    seen = set()
    while True:
        operations = tuple(
            (generator.choice("+-"), generator.randint(1, level.largest)) for _ in range(level.operations)
        )
        chain = Chain(generator.randrange(MODULUS), operations, len(str(level.largest)))
        if chain not in seen:
            seen.add(chain)
            yield chain


def make_task(directory: str | Path, level: str = "easy", seed: int = 1) -> None:
    """Write `train.jsonl`, `heldout.jsonl`, `warmup.jsonl` and `random_model/`. No two files share a chain.

    Rows have the columns `prompt` and `answer`. The same level and seed give the same bytes.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    generator = random.Random(f"{level} {seed}")
    forgotten = LEVELS[level].forgotten
    source = chains(LEVELS[level], generator)
    for name, count in (("heldout", HELD_OUT), ("train", TRAIN)):
        _write_rows(directory / f"{name}.jsonl", ((c.prompt, c.answer) for c in (next(source) for _ in range(count))))
    text = (next(source) for _ in range(TEXT))
    _write_rows(directory / "warmup.jsonl", ((chain.prompt, chain.worked_out(generator, forgotten)) for chain in text))
    write_random_model(directory / "random_model", seed)


def write_random_model(directory: Path, seed: int) -> None:
    """Write a Hugging Face model directory: Qwen3 with random weights and a tokenizer of whole words."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )
    write_small_model(directory, seed, whole, **WIDER)


def _write_rows(path: Path, rows: Iterator[tuple[str, str]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for prompt, answer in rows:
            file.write(json.dumps({"prompt": prompt, "answer": answer}) + "\n")
