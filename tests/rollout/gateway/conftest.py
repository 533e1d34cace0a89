"""A gateway before a scripted policy, and the clients that agents are written with."""

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
from transformers import AutoTokenizer

from dppo_megatron.data.prompts import render_chat
from dppo_megatron.rollout.environments.conversation import Conversation
from dppo_megatron.rollout.gateway import Gateway
from dppo_megatron.types import Rollout
from tests.support.tokenizers import save_character_model

EOS = 1
# Writes calls as no policy does, so that a turn rendered from its parsed parts is noticed.
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL {{ c.function.name }}{% endfor %}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass
class Policy:
    """Answers with `says` of the text before; keeps every turn with the tokens before it."""

    tokenizer: object
    says: Callable[[str], str]
    turns: list[tuple[np.ndarray, Rollout]] = field(default_factory=list)
    delay_s: float = 0.0

    async def sample(self, behind: np.ndarray, most: int | None) -> Rollout:
        await asyncio.sleep(self.delay_s)
        text = self.says(self.tokenizer.decode(behind, skip_special_tokens=False))
        ids = np.array([*self.tokenizer.encode(text, add_special_tokens=False), EOS][:most], np.int32)
        rollout = Rollout(
            ids, -np.random.default_rng(len(self.turns)).random(len(ids), np.float32),
            np.full(len(ids), len(self.turns), np.int32), "stop" if ids[-1] == EOS else "length",
        )  # fmt: skip
        self.turns.append((behind, rollout))
        return rollout


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    directory = save_character_model(tmp_path_factory.mktemp("tokenizer") / "m", chat_template=TEMPLATE)
    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture
def serve(tokenizer):
    """`async with serve(says) as (gateway, key, conversation, policy)`."""

    @asynccontextmanager
    async def serving(says: Callable[[str], str], **settings):
        policy = Policy(tokenizer, says, **settings)
        conversation = Conversation(tokenizer, partial(render_chat, tokenizer), policy.sample)
        async with Gateway("127.0.0.1") as gateway, gateway.session(conversation) as key:
            yield gateway, key, conversation, policy

    return serving
