"""An evaluation in turns with a real environment process and a scripted policy."""

import asyncio
import json

import numpy as np
from transformers import AutoTokenizer

from dppo_megatron.config.task import EvalSet
from dppo_megatron.rollout.environments.episodes import Episodes
from dppo_megatron.rollout.environments.pool import EnvironmentPool
from dppo_megatron.rollout.orchestrator.evaluation import Evaluated, Evaluator
from dppo_megatron.rollout.rewards import RewardPool
from dppo_megatron.types import Prompt, Rollout
from tests.support.configs import make_config
from tests.support.tokenizers import save_character_model

EOS = 1


def test_every_sample_is_a_trajectory_of_its_own(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(save_character_model(tmp_path / "model"))
    config = make_config(
        run={"dir": str(tmp_path / "run")},
        data={"train": "unused"},
        environment={"name": "tests.rollout.environments.worlds:Unscored", "settings": {"turns": 2}, "workers": 3},
        reward={"name": "tests.support.rewards:even_digits"},
    )
    requests = []

    async def sample(make, what):
        request = make(0)
        requests.append(request)
        ids = np.array([*tokenizer.encode("2468", add_special_tokens=False), EOS], np.int32)
        ids = ids[: request.max_tokens]
        reason = "stop" if ids[-1] == EOS else "length"
        return (Rollout(ids, -np.ones(len(ids), np.float32), np.full(len(ids), 3, np.int32), reason),)

    async def run() -> dict:
        (tmp_path / "run").mkdir()
        with EnvironmentPool(config.environment) as environments, RewardPool(config.reward) as rewards:
            episodes = Episodes(
                config, sample=sample, environments=environments, tokenizer=tokenizer, tools=(), stop_token_ids=(EOS,),
                routing=None,
            )  # fmt: skip
            ids = np.array(tokenizer.encode("Hi", add_special_tokens=False), np.int32)
            settings = EvalSet(path="unused", n=3, temperature=0.7, top_p=0.9, max_response_tokens=13)
            settings = settings.model_copy(update={"reward": config.reward})
            evaluator = Evaluator(
                config,
                sets={"sums": Evaluated(settings, [Prompt(0, 0, ids, "Hi", "")], rewards, episodes)},
                tokenizer=tokenizer,
                stop_token_ids=(EOS,),
                output=tmp_path / "run" / "rollouts.jsonl",
                answers=tmp_path / "run" / "answers",
            )
            return (await evaluator.start(3, "policy", None))["sums"]

    found = asyncio.run(run())
    assert found["eval/sums/reward_mean"] == 0.5  # of the last turn, which ends after "24"
    assert found["eval/sums/truncated_share"] == 1.0
    assert {(r.temperature, r.top_p, r.n) for r in requests} == {(0.7, 0.9, 1)}
    assert len({seed for r in requests for seed in r.seeds}) == len(requests) == 6
    (lines,) = (tmp_path / "run" / "answers" / "sums").glob("*.jsonl")
    samples = [s for line in lines.read_text().splitlines() for s in json.loads(line).get("samples", ())]
    assert [s["text"] for s in samples] == ["Hi2468<eos>[2468]24"] * 3
    assert {tuple(s["versions"]) for s in samples} == {(3, 3)}
