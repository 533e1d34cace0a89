"""The cells of `end_to_end.py`: a model size and response length, each with a start model, prompts and a reward.

Importing it needs only the standard library, because TRL's environment calls the reward too.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 32
PROMPTS = 512
PAD, EOS = 0, 1
NUMBER = "-?[0-9]+"

SIZES: dict[
    str, dict[str, int]
] = {  # Qwen3, untied, heads of 64 (32: the narrowest that the engines' CPU attention has)
    "tiny": {"hidden": 32, "mlp": 64, "layers": 1, "heads": 2, "groups": 1, "head": 32, "vocabulary": 64},
    "1M": {"hidden": 128, "mlp": 384, "layers": 4, "heads": 4, "groups": 2, "head": 32, "vocabulary": 1024},
    "20M": {"hidden": 384, "mlp": 1152, "layers": 8, "heads": 6, "groups": 3, "head": 64, "vocabulary": 8192},
    "120M": {"hidden": 768, "mlp": 2304, "layers": 12, "heads": 12, "groups": 4, "head": 64, "vocabulary": 24576},
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One comparison. response: most tokens of a response. samples: per prompt. updates: per step.

    trl_micro_batch: sequences of TRL's forward and backward pass; None for all of an update. micro_batch_tokens: ours.
    """

    size: str
    response: int
    prompts: int
    samples: int
    updates: int = 2
    lr: float = 1e-6
    prompt_tokens: int = PROMPT_TOKENS
    warm: int = 2  # steps before those that are timed
    timed: int = 4
    trl_micro_batch: int | None = None
    micro_batch_tokens: int = 16384

    @property
    def name(self) -> str:
        return f"{self.size}-{self.response}" if self.size in SIZES else self.size

    @property
    def learns(self) -> bool:
        """Return whether the start model can learn the task, so that its accuracy is measured."""
        return self.size not in SIZES

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples


QUICKSTART, LANGUAGE_MODEL = "quickstart", "language-model"
# With these batches a step takes a few seconds on two idle cores.
CELLS = {
    cell.name: cell
    for cell in (
        Cell("tiny", 4, prompts=2, samples=4, warm=1, timed=2),
        Cell(QUICKSTART, 4, prompts=64, samples=16, lr=1e-4, prompt_tokens=16, warm=3, timed=12),
        Cell(
            LANGUAGE_MODEL,
            24,
            prompts=16,
            samples=8,
            updates=1,
            lr=5e-6,
            prompt_tokens=64,
            warm=1,
            timed=2,
            trl_micro_batch=16,
            micro_batch_tokens=1024,
        ),
        Cell("1M", 8, prompts=32, samples=8, timed=10),
        Cell("1M", 64, prompts=32, samples=8, timed=6),
        Cell("1M", 256, prompts=16, samples=8),
        Cell("20M", 8, prompts=16, samples=8, timed=6),
        Cell("20M", 64, prompts=8, samples=8),
        Cell("20M", 256, prompts=4, samples=8),
        Cell("120M", 8, prompts=4, samples=4),
        Cell("120M", 64, prompts=4, samples=4, timed=3),
        Cell("120M", 256, prompts=2, samples=4, warm=1, timed=3),
    )
}


def even(completions: list[str], **_: object) -> list[float]:
    """Return the share of even words of each completion, in TRL's convention.

    It almost always differs between the samples of a prompt, so all of them are trained on.
    """
    words = [[int(word[1:]) for word in text.split() if word[:1] == "w"] for text in completions]
    return [sum(number % 2 == 0 for number in numbers) / max(1, len(numbers)) for numbers in words]


def last_number(completions: list[list[dict[str, str]]], answer: list[str], **_: object) -> list[float]:
    """Return 1 for each turn whose last number is the answer, in TRL's convention for conversations."""
    numbers = [re.findall(NUMBER, turns[-1]["content"])[-1:] for turns in completions]
    return [float(last == [wanted]) for last, wanted in zip(numbers, answer, strict=True)]


even.trusted = True  # type: ignore[attr-defined]  # called in the orchestrator, as TRL calls it in the trainer


def make_model_and_prompts(cell: Cell, directory: Path, seed: int = 1) -> None:
    """Write `model/` with random weights and `prompts.jsonl` with random words, one token each, below `directory`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from dppo_megatron.hf import make_random_hf_model

    words = ("<pad>", "<eos>", *(f"w{i}" for i in range(SIZES[cell.size]["vocabulary"] - 2)))
    make_random_hf_model(directory / "model", model_config(cell), seed, overwrite=True)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.save_pretrained(directory / "model")
    (directory / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS, "pad_token_id": PAD}))
    draw = random.Random(seed)
    with (directory / "prompts.jsonl").open("w") as file:
        for _ in range(PROMPTS):
            prompt = " ".join(draw.choices(words[2:], k=cell.prompt_tokens))
            file.write(json.dumps({"prompt": prompt, "answer": ""}) + "\n")


def model_config(cell: Cell) -> dict[str, Any]:
    size = SIZES[cell.size]
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": size["vocabulary"],
        "hidden_size": size["hidden"],
        "intermediate_size": size["mlp"],
        "num_hidden_layers": size["layers"],
        "num_attention_heads": size["heads"],
        "num_key_value_heads": size["groups"],
        "head_dim": size["head"],
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
