"""Creates small models without network access, for `dppo-megatron init`, examples, studies and tests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from .random_init import make_random_hf_model

PAD = "<pad>"
SIZES = {  # 0.8 M parameters; heads and groups divide by a tensor-parallel size of 2
    "hidden_size": 160,
    "intermediate_size": 448,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the narrowest that the engines' CPU attention supports
    "initializer_range": 0.05,  # the usual 0.02 leaves so narrow a model on a plateau for 150 updates
}
CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools: {{ tools | map(attribute="function") | list | tojson }}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or "" }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write_small_model(directory: Path, seed: int, tokenizer: PreTrainedTokenizerFast, **changes: Any) -> None:
    """Write or replace a Qwen3 model with random weights. `changes` edit config.json. A seed gives the same bytes."""
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    lengths = {"vocab_size": len(tokenizer), "max_position_embeddings": tokenizer.model_max_length}
    config = {"architectures": ["Qwen3ForCausalLM"], **SIZES, **lengths, **ends, **changes}
    make_random_hf_model(directory, config, seed, overwrite=True)
    tokenizer.save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")


def character_tokenizer(vocabulary: Iterable[str], *, eos: str, positions: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token per character. It adds no tokens to a text; unknown characters become `PAD`."""
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token=PAD))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    named = {"eos_token": eos, "pad_token": PAD, "model_max_length": positions, "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=core, **named)


def chat_tokenizer(positions: int = 2048) -> PreTrainedTokenizerFast:
    """Return a tokenizer for ASCII characters with a ChatML template: any roles, tools, Hermes tool calls."""
    end = "<|im_end|>"
    tokenizer = character_tokenizer((PAD, end, "\n", *map(chr, range(32, 127))), eos=end, positions=positions)
    calls = [AddedToken(token, normalized=False) for token in ("<tool_call>", "</tool_call>")]
    tokenizer.add_tokens([AddedToken("<|im_start|>", special=True), *calls])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
