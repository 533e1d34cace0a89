"""Trajectories sampled from real servers: every token once, and the trainer's log-probs are the engine's."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dppo_megatron.bank import BankReader, BankWriter
from dppo_megatron.config import Config
from dppo_megatron.data.tokenizer import load_tokenizer
from dppo_megatron.objectives import build_objective
from dppo_megatron.rollout.engines.protocol import Engine
from dppo_megatron.rollout.environments.episodes import Episodes
from dppo_megatron.rollout.environments.pool import EnvironmentPool
from dppo_megatron.rollout.fleet.pool import FixedEngines
from dppo_megatron.rollout.fleet.sampling import Sampler
from dppo_megatron.rollout.rewards import RewardPool
from dppo_megatron.types import Prompt, RolloutGroup
from tests.support.actor_ranks import Rank, run_scenario
from tests.support.audit import audit
from tests.support.engines import EOS, PROMPT, VOCAB

PROMPTS, SAMPLES, LONGEST, TURNS = 4, 4, 120, 3
STOPS = (EOS, 2, 3, 4, 5)
# Earlier turns are cut, and end with one stop token whichever it was: of most of them history is rewritten.
REWRITES = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<A>{{ m.content[:40] }}$"
    "{% else %}<U>{{ m.content }}{% endif %}{% endfor %}<A>"
)
METHOD = {"name": "dppo_binary_tv", "settings": {"entropy_coefficient": 0.01}}  # every sample has a gradient


def turns_config(config: Config, chat: bool, directory: Path) -> Config:
    """The server's config with an environment of three turns."""
    rollout = config.rollout.model_dump() | {
        "prompts_per_step": 2 * PROMPTS,
        "group_size": SAMPLES,
        "max_response_tokens": LONGEST,
        "topk_logprobs": 4,
        "stop_token_ids": STOPS,
        "bank": None,
    }
    tree = config.model_dump() | {
        "rollout": rollout,
        "environment": {"name": "tests.rollout.environments.worlds:Echo", "settings": {"turns": TURNS}, "workers": 4},
        "data": config.data.model_dump() | {"chat_template": chat},
    }
    return Config.model_validate(tree)


async def play(engine: Engine, config: Config, chat: bool) -> tuple[list[RolloutGroup], dict]:
    """Groups of prompts, and every turn as the engine returned it."""
    tokenizer = load_tokenizer(config.model.path, VOCAB)
    tokenizer.chat_template = REWRITES if chat else None
    sampler, returned = Sampler(FixedEngines([engine])), {}

    async def sample(request, what):
        (rollout,) = await sampler.sample(request, what)
        name, seat, turn = request(0).request_id.split(".")
        returned[int(name.split("-")[1]), int(seat), int(turn.split("-")[0])] = rollout
        return (rollout,)

    text = tokenizer.decode(PROMPT)
    routing = (4, 2) if config.rollout.routing_replay else None
    with EnvironmentPool(config.environment) as environments, RewardPool(config.reward) as rewards:
        episodes = Episodes(
            config, sample=sample, environments=environments, tokenizer=tokenizer, tools=(), stop_token_ids=STOPS,
            routing=routing,
        )  # fmt: skip
        begun = []
        for position in range(PROMPTS):
            position += PROMPTS * chat
            row = text[: 4 + position]
            rendered = f"<U>{row}<A>" if chat else row
            ids = np.array(tokenizer.encode(rendered, add_special_tokens=False), np.int32)
            # A trajectory that is cut at its longest is graded by its text, and is trained on only if it can be.
            begun.append(episodes.play(Prompt(position, position, ids, rendered, "0", {"prompt": row}), rewards))
        return list(await asyncio.gather(*begun)), returned


@pytest.fixture
def played(served, tmp_path) -> tuple[list[RolloutGroup], dict, Path]:
    """Groups without and with a chat template that rewrites history, in a bank."""
    groups, returned = [], {}
    for chat in (False, True):
        config = turns_config(served.config, chat, tmp_path)
        some, turns = served.use(lambda engine, c=config, chat=chat: play(engine, c, chat))
        groups += some
        returned |= turns
    with BankWriter(tmp_path / "bank", len(groups), fsync=False) as bank:
        for group in groups:
            bank.append(group)
    return groups, returned, tmp_path / "bank"


def trainer_logprobs(rank: Rank, model: str, bank: Path, replay: bool) -> dict[str, tuple[float, int, int]]:
    """Return by layout: the largest difference from the engine's log-probs, the compared tokens, the micro-batches."""
    from dppo_megatron.train.trainer.batches import BankBatches, parts_of

    found = {}
    sections: dict[str, dict[str, Any]] = {
        "train": {"steps": 1, "micro_batch_tokens": 400},
        "rollout": {
            "bank": str(bank), "prompts_per_step": 2 * PROMPTS, "group_size": SAMPLES, "max_response_tokens": LONGEST,
            "topk_logprobs": 4, "routing_replay": replay,
        },
        "objective": METHOD,
    }  # fmt: skip
    for name, layout in {"tensor": {"tensor": 2, "sequence": True}, "context": {"context": 2}}.items():
        with rank.actor(model, sections=sections, **layout) as actor:
            objective = build_objective(METHOD["name"], **METHOD["settings"])
            share = actor.shares_prefixes
            batches = BankBatches(
                actor.config, BankReader(bank), objective, 0, 1, parts_of(actor, objective), share_prefixes=share
            )
            (update,) = batches.read(0).updates
            scored = actor.logprobs(update.micro_batches)
        apart = [(s - b.rollout_logprob)[b.mask] for s, b in zip(scored, update.micro_batches, strict=True)]
        found[name] = float(torch.cat(apart).abs().max()), sum(map(len, apart)), len(update.micro_batches)
    return found


@pytest.mark.slow
def test_the_trainer_has_the_engines_logprobs_of_every_turn(served, played, ranks, tmp_path):
    groups, returned, bank = played
    checked = audit(groups, returned)
    print(checked)
    assert checked.problems == []
    counts = checked.counts
    assert counts["trajectories"] == 2 * PROMPTS * SAMPLES
    assert counts["policy tokens"] == sum(len(rollout.token_ids) for rollout in returned.values())
    assert counts["turns"] == len(returned) > 1.5 * counts["trajectories"]
    assert counts["branches"] > counts["trajectories"]
    assert counts["environment tokens"] > counts["turns"]
    reader = BankReader(bank)
    stored = [reader.read(entry) for entry in reader.entries(0, reader.refresh())]
    assert audit(stored, returned).counts == counts

    model = served.models["a"]
    replay = served.config.rollout.routing_replay
    found = run_scenario(ranks(2), trainer_logprobs, model.parent, tmp_path / "ranks", model.name, bank, replay)
    print(found)
    for layout, (difference, tokens, micro_batches) in found.items():
        assert tokens == counts["policy tokens"], layout
        assert micro_batches < counts["branches"], layout  # they are packed
        assert difference < 2e-5, layout  # both round to fp32: 1.2e-5 seen
